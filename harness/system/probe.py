"""Find out in a separate process what torch and DeepSpeed can do on this machine.

    python -m harness.system.probe [--build OP ...]

prints one line of JSON for ``harness.system.machine``. The launching process never imports torch: a
CUDA context there would be counted as memory. Nothing that is missing makes it fail.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from harness.system.capability import shortfall
from harness.system.process import own_tools_first, plain_architectures
from strategies.base import BadInput

PACKAGES = ("torch", "deepspeed", "accelerate", "transformers", "numpy")

OPS = {
    "cpu_adam": "CPUAdamBuilder",
    "async_io": "AsyncIOBuilder",
    "shm_comm": "ShareMemCommBuilder",
}
"""DeepSpeed ops that compile on first use -> their builders."""
ON = {"shm_comm": "cpu"}
"""Ops that exist for one device type only."""

DECISIVE = ("error:", "fatal", "not found", "cannot find", "unable", "missing", "does not exist")
"""Words that usually mark the line of a failed build with its cause."""
LONGEST = 400
"""Characters. A longer line is a compiler's command."""


def facts(build: Sequence[str] = ()) -> dict[str, Any]:
    """Return all facts as plain data; compile and load the ops named in ``build``."""
    own_tools_first()
    plain_architectures()
    answer: dict[str, Any] = {
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "torch": None,
        "gpus": [],
        "backends": [],
        "abilities": {},
        "ops": {},
        "errors": {},
    }
    for name, look in (("torch", _torch), ("deepspeed", lambda: {"ops": _ops(build)})):
        try:
            answer |= look()  # replaces the empty values above
        except (Exception, SystemExit) as error:  # a broken installation can raise anything
            answer["errors"][name] = decisive(f"{type(error).__name__}: {error}")
    return answer


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    checks = {"gloo": "is_gloo_available", "nccl": "is_nccl_available"}
    has, groups = torch.distributed.is_available(), torch.distributed
    gpus = [
        {
            "name": properties.name,
            "uuid": str(getattr(properties, "uuid", "")),
            "total_bytes": properties.total_memory,
            "capability": [properties.major, properties.minor],
        }
        for properties in map(torch.cuda.get_device_properties, range(count))
    ]
    build = {"version": torch.__version__, "cuda": torch.version.cuda}
    return {
        "torch": {**build, "built_for": torch.cuda.get_arch_list()},
        "gpus": gpus,
        "backends": [name for name, check in checks.items() if has and getattr(groups, check)()],
        "no_cuda": "" if gpus else _no_cuda(torch),
        "abilities": _abilities(torch, gpus),
    }


def _no_cuda(torch: Any) -> str:
    """Return torch's own reason for having no GPU."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return reason_against(torch.cuda.init) or "it finds no device"


def demand_gpu(device: str) -> None:
    """Import torch, and refuse ``cuda`` in one line where torch sees no GPU."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput(
            f"device is cuda, and torch sees no GPU here ({_no_cuda(torch)}); give --device cpu, "
            "or a machine with a GPU"
        )


def _too_old(need: str, gpus: list[dict[str, Any]]) -> str:
    """Return why the first GPU below the capability of ``need`` is too old; empty if none is."""
    reasons = (shortfall(need, tuple(g["capability"]), g["name"]) for g in gpus)
    return next(filter(None, reasons), "")


NUMBERS = {
    "fp16": "accelerate and DeepSpeed train in fp16 on GPUs only",
    "tf32": "TF32 is a rounding of NVIDIA GPUs",
    "fp8": "NVIDIA GPUs multiply fp8; a CPU's kernel converts it first",
    "sparse24": "2:4 sparse products exist on NVIDIA GPUs only",
}
"""Number format -> why a CPU lacks it; of GPUs see ``harness.system.capability``."""


def _abilities(torch: Any, gpus: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return ability -> device -> why the device lacks it; empty if it has it."""
    devices = ("cpu", "cuda") if gpus else ("cpu",)
    lacks = {name: {"cuda": _too_old(name, gpus)} for name in (*NUMBERS, "bf16")}
    ones = torch.ones(8, 8, dtype=torch.bfloat16)
    lacks["bf16"]["cpu"] = reason_against(lambda: ones @ ones)
    for kernel in ATTENTION:
        lacks[f"attention_{kernel}"] = {d: _attention(torch, kernel, d) for d in devices}
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
    found = any(map(shutil.which, compilers))
    lacks["inductor"] = {
        "cpu": "" if found else "torch.compile generates C++: no g++ here",
        "cuda": _no_triton() if gpus else "",
    }
    return lacks


def _no_triton() -> str:
    from torch.utils._triton import has_triton

    if not has_triton():
        return "torch.compile generates Triton kernels: no working triton here"
    return reason_against(_triton_kernel)


def _triton_kernel() -> None:
    """Compile and run a kernel of one line: Triton builds its launcher in C, against Python.h."""
    import torch

    from harness.system.triton_kernel import doubled

    x = torch.ones(8, device="cuda")
    if not torch.equal(doubled(x), x + x):
        raise RuntimeError("a Triton kernel's result came out wrong")


ATTENTION = {
    "efficient": "EFFICIENT_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "flex": None,
}
"""Attention kernel -> torch's name of the backend; flex is a separate function."""


def _attention(torch: Any, kernel: str, device: str) -> str:
    """Return why ``kernel`` cannot train on ``device``, by running a forward and a backward.

    torch's warnings say why it rejects a backend; its error only says that none is left.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import flex_attention

    def attempt() -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        q = torch.ones(1, 1, 128, 64, device=device, dtype=dtype, requires_grad=True)
        if kernel == "flex":
            flex_attention(q, q, q).sum().backward()
            return
        with sdpa_kernel(SDPBackend.__members__[ATTENTION[kernel]]):
            torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        reason = reason_against(attempt)
    if "No viable backend" not in reason:
        return reason
    return decisive(str(said[0].message)) if said else f"torch has none for {device.upper()}s"


def _ops(build: Sequence[str]) -> dict[str, dict[str, Any]]:
    import deepspeed  # noqa: F401  (a broken install fails here, by its own name)
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    return {
        name: _op(functools.partial(accelerator.create_op_builder, kind), name in build)
        for name, kind in OPS.items()
        if ON.get(name, accelerator.device_name()) == accelerator.device_name()
    }


def _op(make: Callable[[], Any], build: bool) -> dict[str, Any]:
    """Return whether one op can be used: ``reason`` is empty if so; ``file`` is the built file."""
    file = None

    def look() -> None:
        nonlocal file
        builder = make()
        if builder is None or not builder.is_compatible(verbose=False):
            log = getattr(builder, "error_log", None) or "DeepSpeed finds it not compatible"
            raise RuntimeError(log)
        if build:
            if builder.name == "async_io":
                from strategies.engines.zero.inputs import plain_file_access

                plain_file_access()
            file = getattr(builder.load(verbose=False), "__file__", None)

    reason = reason_against(look)
    return {"ok": not reason, "reason": reason, "file": file, "built": build}


def reason_against(attempt: Callable[[], Any]) -> str:
    """Return why ``attempt`` fails, in one line; empty if it succeeds."""
    try:
        attempt()
    except (Exception, SystemExit) as error:
        return decisive(f"{type(error).__name__}: {error}")
    return ""


def decisive(text: str) -> str:
    """Return the line of a failure that names its cause, cut to 200 characters.

    It is the first error of a compilation, not ninja's "build stopped" or a command line.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    telling = [x for x in lines if any(w in x.lower() for w in DECISIVE) and len(x) < LONGEST]
    return (telling or lines)[0][:200]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.system.probe", description=__doc__)
    parser.add_argument("--build", nargs="*", default=[], choices=tuple(OPS), metavar="OP")
    options = parser.parse_args(argv)
    # Compilers and DeepSpeed write to stdout: they get stderr instead.
    answer = os.dup(1)
    os.dup2(2, 1)
    known = facts(options.build)
    with os.fdopen(answer, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(known) + "\n")
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # extensions that were loaded for the test may abort in their destructors
