"""Requirements that a run has and this machine lacks, with remedies. Imports no torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness import RUN, SET_UP
from harness.resolve import Resolved
from harness.spec import Spec
from harness.system import machine as kernel
from harness.system.capability import no_kernels, shortfall
from harness.system.gpus import BUSY_BYTES
from harness.system.machine import Machine
from harness.system.probe import NUMBERS, version
from strategies.base import GPUS, Reason

SWAP_BYTES = 16 * 1.2
"""NVMe bytes per parameter: float32 master, two moments and a gradient, rewritten."""

TORCH = f"{SET_UP}, or install torch, accelerate and deepspeed into your Python"
WAYS = {
    "torch": TORCH,
    "probe": TORCH,
    "deepspeed": f"pip install deepspeed transformers (torch first), or {SET_UP}",
    "cpu_adam": "install a compiler and ninja: apt-get install g++ ninja-build "
    "(Fedora: dnf install gcc-c++ ninja-build)",
    "async_io": "apt-get install libaio-dev (Debian, Ubuntu) or dnf install libaio-devel (Fedora)",
    "bf16": "leave bf16 out; float32 runs everywhere, fp16 on any NVIDIA GPU",
    "sparse24": "run it on an NVIDIA GPU since Ampere (--device cuda), or leave sparse24 out",
    "cuda": "run it on a machine with an NVIDIA GPU (--device cuda)",
    "fp16": "use bf16, which needs no scaling of the loss",
    "tf32": "leave tf32 out; float32 runs everywhere",
    "fp8": "use bf16, or for the numbers alone fp8:emulate=on (to draw samples, "
    "float8:dynamic=on,emulate=on)",
    "int8": "leave dynamic out, which decodes the weights for each product",
    "inductor": "install g++ (CPU) or triton (GPU), or compile:backend=aot_eager",
    "attention": "take another kernel: naive and math run everywhere",
}
"""Need named in ``strategies`` -> how to install it."""
BUILT = ("cpu_adam", "async_io")
"""DeepSpeed ops, compiled before the first run that needs them."""
PYTHON_H = "Python.h"
HEADERS = "apt-get install python3-dev (Debian, Ubuntu) or dnf install python3-devel (Fedora)"
"""Triton and DeepSpeed compile C against Python's headers at run time."""

MAY_NOT_WRITE = "set TORCH_EXTENSIONS_DIR to a folder that you may write to"
BUILDING = {
    PYTHON_H: HEADERS,
    "Permission denied": MAY_NOT_WRITE,
    "Read-only file system": MAY_NOT_WRITE,
    "cannot find -lcuda": "add the folders of libcuda.so (the driver) and libcudart.so (the CUDA "
    "toolkit) to LIBRARY_PATH",
    "No space left on device": "free disk space, or set TORCH_EXTENSIONS_DIR to a larger disk",
}
"""Words of the reason for a failed build -> remedy. Other reasons have the op's remedy."""
SIGHT = {
    "too old": "update the NVIDIA driver, or install a torch whose CUDA is not newer than it "
    "(docs/how-to/install.md, GPUs)",
    "": "mend the driver (nvidia-smi and torch must run as the same user, in the same container)",
}
"""Words of torch's reason for seeing no GPU -> remedy; the last entry is for all other reasons."""
PACKAGES_OF = {"torch": ("torch", "accelerate"), "deepspeed": ("deepspeed", "transformers")}
EXTRAS: tuple[str, ...] = ("torchao", "peft", "bitsandbytes", "diffusers", "cut_cross_entropy")
EXTRAS += ("prodigyopt", "came_pytorch")
"""Packages of single strategies; the word in ``Strategy.needs`` is the package's name."""


def obstacle(resolved: Resolved, machine: Machine) -> Reason | None:
    """Return the first thing that ``resolved`` needs and ``machine`` lacks."""
    spec = resolved.spec
    if spec.phases:
        why = f"phases is {spec.phases}, and a run is measured by its set-up and its steps"
        return Reason(why, f"leave it out; {RUN} plan --phases predicts them")
    if spec.snapshot and spec.device != "cuda":
        return Reason(
            "--snapshot records the CUDA allocator's history, and this row runs on the CPU",
            "leave --snapshot out; --profile records allocations on a CPU, anatomy follows each "
            "tensor",
        )
    lack = _lacks_gpus(spec, machine)
    for need in ("torch", *resolved.needs):
        lack = lack or lacks(need, machine, spec)
    if lack is None and "nvme" in map(resolved.launch.engine.place, ("optimizer", "parameters")):
        wanted, free = int(resolved.subject.parameters * SWAP_BYTES), machine.disk_free_bytes
        text = f"NVMe offload swaps about {gib(wanted)} to {machine.folder}, which has {gib(free)}"
        way = "free disk space, or put the results on a larger disk with --out"
        lack = Reason(f"{text} free", way) if free < wanted else None
    return lack


def lacks(need: str, machine: Machine, spec: Spec) -> Reason | None:
    """Return why ``need`` (a word of ``Strategy.needs``, or torch) is not met, as far as is known.

    If the machine was not examined, an op counts as present.
    """
    if need in EXTRAS and version(need) is None:
        return Reason(f"the package {need} is not installed", f"pip install {need}")
    if need == "cuda" and spec.device != "cuda":
        there = "no GPU memory to page or offload, and no CUDA graph"
        return Reason(f"without an NVIDIA GPU there is {there}", WAYS[need])
    if need == "linear_cross_entropy":  # torch's own, by its source file
        found = importlib.util.find_spec("torch")
        folder = Path(found.origin).parent if found and found.origin else Path("nowhere")
        has = (folder / "nn" / "modules" / "linear_cross_entropy.py").exists()
        text = f"torch {version('torch')} has no linear_cross_entropy"
        hint = "install torch 2.13, or take cross_entropy:kind=chunked"
        return None if has else Reason(text, hint)
    for package in PACKAGES_OF.get(need, ()):
        if machine.versions[package] is None:
            return Reason(f"the package {package} is not installed", WAYS[need])
    probe = machine.probe or {"errors": {}, "ops": {}}
    for part in ("probe", "torch", "deepspeed"):
        if part in probe["errors"] and (part != "deepspeed" or need in ("deepspeed", *BUILT)):
            why, way, limit = probe["errors"][part], WAYS[part], kernel.shell_limit()
            if limit is None:
                return Reason(f"{part} does not work: {why}", way)
            # A memory limit of this shell is the likely cause.
            below = f"below the limit {limit[0]} of {gib(limit[1])}"
            way = f"{limit[0]} unlimited, then the same command in that shell"
            return Reason(f"{part} does not work {below}: {why}", way)
    if need in BUILT:
        return _lacks_op(need, probe["ops"].get(need), machine)
    reason = probe.get("abilities", {}).get(need, {}).get(spec.device, "")
    if need in NUMBERS and spec.device == "cpu":
        reason = NUMBERS[need]
    if not reason:
        return None
    kind, _, way = need.partition("_")
    what = f"no {way} attention to train with" if kind == "attention" else f"no {need}"
    return Reason(f"{what} on this device: {reason}", HEADERS if PYTHON_H in reason else WAYS[kind])


def card_lacks(
    needs: Iterable[str], card: str, capability: tuple[int, int] | None
) -> Reason | None:
    """Return the first of ``needs`` that ``card`` is too old for; None if it is unknown."""
    if capability is None:
        return None
    for need in needs:
        reason = shortfall(need, capability, card)
        if reason:
            return Reason(reason, WAYS[need.partition("_")[0]])
    return None


def _lacks_op(need: str, op: dict[str, Any] | None, machine: Machine) -> Reason | None:
    missing = [n for n, path in (("g++", machine.compiler), ("ninja", machine.ninja)) if not path]
    if missing:
        text = f"{need} compiles on first use; missing: {', '.join(missing)}"
        return Reason(text, WAYS["cpu_adam"])
    if op is None or op["ok"]:
        return None
    reason = op["reason"]
    hint = next((way for word, way in BUILDING.items() if word in reason), WAYS[need])
    if " " in sys.prefix:
        reason = f"torch quotes no path, and {sys.prefix} has a space"
        hint = "set HEADROOM_VENV to a folder without a space, or take a HEADROOM_PYTHON in one"
    elif need == "async_io" and "not compatible" in reason:
        reason, hint = "no libaio (header or library)", WAYS[need]
    elif "CUDA" in reason:
        hint = "install the CUDA toolkit (nvcc) of torch's own CUDA version and set CUDA_HOME"
    return Reason(f"{need} cannot be built: {reason}", hint)


def _lacks_gpus(spec: Spec, machine: Machine) -> Reason | None:
    if spec.device != "cuda":
        return None
    here = len(machine.gpus)
    if unusable := lacks_sight(machine) or lacks_kernels(machine):
        return unusable
    if spec.local_processes > here:
        fewer = f"use --processes {here * spec.nodes}" if here else "use --device cpu"
        local = spec.local_processes
        some = "1 process needs" if local == 1 else f"{local} processes need"
        text = f"{some} as many GPUs; this machine has {here} GPU{'s' * (here != 1)}"
        return Reason(text, fewer, about=GPUS)
    if spec.processes > 1 and machine.probe and "nccl" not in machine.probe["backends"]:
        return Reason("this torch has no NCCL", "install torch's CUDA build for Linux")
    for gpu in machine.gpus[: spec.local_processes]:
        if gpu.busy:
            return Reason(
                f"GPU {gpu.index} is in use: {gpu.who()}",
                "wait, end that process, or choose free GPUs with CUDA_VISIBLE_DEVICES",
            )
    return None


def lacks_sight(machine: Machine) -> Reason | None:
    """Return the requirement if nvidia-smi sees GPUs and torch does not."""
    why = machine.blind
    if not why:
        return None
    built_for = ((machine.probe or {}).get("torch") or {}).get("cuda", "unknown")
    ways = (way for word, way in SIGHT.items() if word in why)
    way = next(ways) if built_for else "install torch's CUDA build"
    several = len(machine.gpus) > 1
    return Reason(
        f"nvidia-smi sees {len(machine.gpus)} GPU{'s' * several} and torch none: {why}",
        f"{way}; or --device cpu to leave {'them' if several else 'it'} unused",
    )


def lacks_kernels(machine: Machine) -> Reason | None:
    """Return the requirement for a GPU that the installed torch has no machine code for."""
    probe = machine.probe or {}
    built_for = (probe.get("torch") or {}).get("built_for", [])
    for gpu in probe.get("gpus", []):
        reason = no_kernels(tuple(gpu["capability"]), built_for, gpu["name"])
        if reason:
            way = "install a torch that is built for it, or hide it (CUDA_VISIBLE_DEVICES)"
            return Reason(reason, way)
    return None


def notes(resolved: Resolved, machine: Machine) -> list[str]:
    """Return remarks for the reader of a row that can run."""
    spec, cores = resolved.spec, machine.cores
    local = spec.local_processes
    used = machine.gpus[:local] if spec.device == "cuda" else ()
    texts = [
        f"{gib(gpu.unexplained_bytes)} of GPU {gpu.index} are held by a desktop or the driver"
        for gpu in used
        if gpu.unexplained_bytes > BUSY_BYTES
    ]
    if spec.device == "cpu" and local > cores:
        texts.append(f"{local} processes share {cores} cores: times mean little")
    return texts + resolved.launch.engine.remarks(resolved.launch, resolved.subject.survey.sizes)


def needed_ops(resolved: Sequence[Resolved]) -> set[str]:
    """Return the ops to compile first, so that no run's start includes a compilation."""
    ops = {need for r in resolved for need in r.needs if need in BUILT}
    on_cpu = any("deepspeed" in r.needs and r.spec.device == "cpu" for r in resolved)
    return ops | ({"shm_comm"} if on_cpu else set())


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
