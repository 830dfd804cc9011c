"""What a station is asked for, and how it takes time."""

from __future__ import annotations

import contextlib
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness import ROOT
from harness.planner.overhead import scratch
from harness.system import gpus

WINDOWS = {"cpu": (0.0005, 1.0), "cuda": (0.2, 1.2)}
"""Seconds of a window of equal calls, and of all windows. Other work of the machine hits a CPU, and
threads that wait for one another most: of many short windows it leaves some alone. A GPU must run
long enough to take its clock under load."""
SMALL = (0.0002, 0.02)
LEAST_WINDOWS = 3


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A device, and whether small shapes will do: a rehearsal, whose numbers mean nothing."""

    device: torch.device
    small: bool = False
    ranks: int = 1

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def random(self, *shape: int, dtype: torch.dtype = torch.float32, **more: Any) -> torch.Tensor:
        """Normal numbers: products of zeros or ones take less power, and so run faster."""
        made = torch.randn(*shape, device=self.device, dtype=torch.float32)
        return made.to(dtype).requires_grad_(more.get("requires_grad", False))


def seconds_of(work: Callable[[], Any], asked: Asked) -> float:
    """Seconds of one call: the best of several windows of calls back to back."""
    least, whole = SMALL if asked.small else WINDOWS[asked.device.type]
    work()
    once = min(_window(work, asked, 1) for _ in range(LEAST_WINDOWS))
    calls = max(1, math.ceil(least / max(once, 1e-7)))
    best, spent, windows = once, 0.0, 0
    while spent < whole or windows < LEAST_WINDOWS:
        took = _window(work, asked, calls)
        best, spent, windows = min(best, took / calls), spent + took, windows + 1
    return best


def _window(work: Callable[[], Any], asked: Asked, calls: int) -> float:
    asked.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    asked.synchronize()
    return time.perf_counter() - start


def reason(error: Exception) -> str:
    """The first line of what a library raised."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {first}"[:200]


# ---- products ----
# FLOP/s of matrix products of random data, by type: large squares, and the shapes of a DiT.


TYPES = {
    "cuda": ("bfloat16", "float16", "tf32", "float32", "float8"),
    "cpu": ("float32", "bfloat16", "float16"),
}
SIDES = {"cuda": (4096, 8192), "cpu": (512, 1024, 2048)}
SMALL_SIDES = (128,)
BLOCK = {"cuda": (8192, 1152), "cpu": (2048, 384)}
"""Tokens of a micro batch, and width: of DiT-XL/2 with 32 samples, and of DiT-S with 8."""
SMALL_BLOCK = (128, 64)
FP8 = torch.float8_e4m3fn


def measure(asked: Asked) -> dict[str, Any]:
    """``products`` and ``model_products``, FLOP/s by type; ``missing``: type -> why not."""
    kind = asked.device.type
    sides = SMALL_SIDES if asked.small else SIDES[kind]
    block = SMALL_BLOCK if asked.small else BLOCK[kind]
    squares, blocks, missing = {}, {}, {}
    for name in TYPES[kind]:
        try:
            with _rounding(name):
                squares[name] = max(_square(name, side, asked) for side in sides)
                if name != "float8":  # its products in a model are of rows scaled one by one
                    blocks[name] = _block(name, *block, asked)
        except Exception as error:  # whatever a library lacks for a type is the answer
            missing[name] = reason(error)
    return {"products": squares, "model_products": blocks, "missing": missing}


@contextlib.contextmanager
def _rounding(name: str) -> Iterator[None]:
    """float32's products as they are, or rounded to TF32."""
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def _type(name: str) -> torch.dtype:
    return torch.float32 if name == "tf32" else getattr(torch, name)


def _square(name: str, side: int, asked: Asked) -> float:
    if name == "float8":
        return 2 * side**3 / seconds_of(_fp8_product(side, asked), asked)
    a, b = (asked.random(side, side, dtype=_type(name)) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / seconds_of(lambda: torch.mm(a, b, out=out), asked)


def _fp8_product(side: int, asked: Asked) -> Callable[[], Any]:
    a, b = (asked.random(side, side).to(FP8) for _ in range(2))
    one = torch.ones((), device=asked.device)
    turned = b.t()  # the second operand lies by columns
    return lambda: torch._scaled_mm(a, turned, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _block(name: str, tokens: int, width: int, asked: Asked) -> float:
    """The linear layers of a block, with the two products of each one's backward."""
    flops, seconds = 0, 0.0
    for inner, outer in (
        (width, 3 * width),
        (width, width),
        (width, 4 * width),
        (4 * width, width),
    ):
        x = asked.random(tokens, inner, dtype=_type(name))
        weight = asked.random(outer, inner, dtype=_type(name))
        grad = asked.random(tokens, outer, dtype=_type(name))
        # Bound now: a closure of the loop's names would see the last ones.
        for product in (
            lambda x=x, weight=weight: x @ weight.t(),
            lambda grad=grad, weight=weight: grad @ weight,
            lambda grad=grad, x=x: grad.t() @ x,
        ):
            seconds += seconds_of(product, asked)
            flops += 2 * tokens * inner * outer
    return flops / seconds


# ---- attention ----
# FLOP/s of each kernel of attention at heads of 64 and 72, and what its backward takes beside.


KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
HERE = {
    "cuda": (("bfloat16", "float16", "float32"), tuple(KERNELS)),
    "cpu": (("float32", "bfloat16"), ("flash", "math")),
}
"""Device -> types and kernels that it may have."""
WIDTHS = (64, 72)
"""Of a head: DiT-S, B and L have 64, DiT-XL 72."""
SHAPE = {"cuda": (32, 16, 256), "cpu": (8, 6, 256)}
SMALL_SHAPE = (2, 2, 64)
PASSES = 14
"""Products of T x T x K, times two, that forward (2) and backward (5) take together, as torch's
FLOP counter has them."""
OPERATION = "aten._scaled_dot_product_{}_attention_backward.default"


def measure_attention(asked: Asked) -> dict[str, Any]:
    """``attention``: a rate for each kernel, type and width; ``missing``: the others, and why."""
    types, kernels = HERE[asked.device.type]
    found, missing = [], {}
    for kernel in kernels:
        for dtype in types:
            for width in WIDTHS:
                try:
                    found.append(_rate(kernel, dtype, width, asked))
                except Exception as error:  # a kernel that does not take this is an answer
                    missing[f"{kernel} {dtype} {width}"] = reason(error)
    return {"attention": found, "missing": missing}


def _rate(kernel: str, dtype: str, width: int, asked: Asked) -> dict[str, Any]:
    batch, heads, tokens = SMALL_SHAPE if asked.small else SHAPE[asked.device.type]
    shape = (batch, heads, tokens, width)
    kind = getattr(torch, dtype)
    qkv = [asked.random(*shape, dtype=kind, requires_grad=True) for _ in range(3)]
    grad = asked.random(*shape, dtype=kind)

    def step() -> None:
        out = functional.scaled_dot_product_attention(*qkv)
        torch.autograd.grad(out, qkv, grad)

    with sdpa_kernel(KERNELS[kernel]):
        seconds = seconds_of(step, asked)
        taken = _scratch(qkv, grad) if asked.on_gpu else None
    row = {"kernel": kernel, "dtype": dtype, "width": width}
    row["rate"] = PASSES * batch * heads * tokens**2 * width / seconds
    formula = scratch(OPERATION.format(kernel), [shape, shape]) if asked.on_gpu else None
    return {**row, "scratch_bytes": taken, "formula_bytes": formula}


def _scratch(qkv: list[torch.Tensor], grad: torch.Tensor) -> int:
    """What a backward held at most beside its three results."""
    out = functional.scaled_dot_product_attention(*qkv)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, qkv, grad)
    held = sum(g.untyped_storage().nbytes() for g in grads)
    return max(0, torch.cuda.max_memory_allocated() - before - held)


# ---- streams ----
# Bytes a second of elementwise operations and of copies, and the seconds of a launch.


MIB = 2**20
MOVED = {"cuda": (4, 32, 256, 2048), "cpu": (1, 4, 16, 64, 256)}
"""MiB that an operation reads and writes: what is small may stay in a cache."""
SMALL_MOVED = (1, 4)
HOST = 512 * MIB
COPIED = 256 * MIB
TINY = 2000
"""Launches in a row."""


def measure_streams(asked: Asked) -> dict[str, Any]:
    """``streams``: [bytes moved, rate]; ``launch_seconds``; ``host_rate`` of host memory."""
    sizes = SMALL_MOVED if asked.small else MOVED[asked.device.type]
    streams = [{"bytes": size * MIB, "rate": _stream(size * MIB, asked)} for size in sizes]
    host = Asked(device=torch.device("cpu"), small=asked.small)
    host_rate = _stream(MIB if asked.small else HOST, host) if asked.on_gpu else streams[-1]["rate"]
    return {"streams": streams, "launch_seconds": _launch(asked), "host_rate": host_rate}


def _stream(moved: int, asked: Asked) -> float:
    """Half of the bytes are read, and half written."""
    source = asked.random(moved // 8)
    target = torch.empty_like(source)
    return moved / seconds_of(lambda: torch.mul(source, 1.5, out=target), asked)


def _launch(asked: Asked) -> float:
    one = torch.ones(1, device=asked.device)

    def launches() -> None:
        for _ in range(TINY):
            one.mul_(1.0)

    return seconds_of(launches, asked) / TINY


def measure_copies(asked: Asked) -> dict[str, Any]:
    """Way -> bytes a second of copies between a GPU and host memory, pinned and pageable."""
    count = (MIB if asked.small else COPIED) // 4
    on_device, rates = torch.ones(count, device=asked.device), {}
    for kind in ("pinned", "pageable"):
        host = torch.ones(count, pin_memory=kind == "pinned")
        there = seconds_of(lambda host=host: on_device.copy_(host, non_blocking=True), asked)
        back = seconds_of(lambda host=host: host.copy_(on_device, non_blocking=True), asked)
        rates |= {f"{kind} to device": 4 * count / there, f"{kind} to host": 4 * count / back}
    return {"copies": rates}


# ---- standing ----
# Bytes that stand beside a training: CUDA's context and cuBLAS's workspaces, or an interpreter.


WORKER = "import harness.train; print(open('/proc/self/status').read())"
USED = "--query-gpu=index,uuid,memory.used"


def measure_overhead(asked: Asked) -> dict[str, Any]:
    """``context`` and ``libraries``, bytes."""
    if not asked.on_gpu:
        return {"context": _interpreter()}
    before = _used()
    one = torch.ones(1, device=asked.device)
    free, total = torch.cuda.mem_get_info(asked.device)
    context = total - free - torch.cuda.memory_reserved(asked.device) - before
    del one
    return {"context": max(0, context), "libraries": _libraries(asked)}


def _used() -> int:
    """What others hold of the first GPU that is seen, before this process has a context."""
    rows = gpus.rows(gpus.smi(USED), 3)
    found = gpus.parse("\n".join(f"{i}, {uuid}, -, 0, {used}" for i, uuid, used in rows), "")
    return next((gpu.used_bytes for gpu in gpus.chosen(found)), 0)


def _libraries(asked: Asked) -> int:
    """What stays allocated once products ran in this thread and in autograd's."""
    x = asked.random(1024, 1024, dtype=torch.bfloat16, requires_grad=True)
    before = torch.cuda.memory_allocated(asked.device)
    (x @ x).sum().backward()
    x.grad = None
    asked.synchronize()
    return torch.cuda.memory_allocated(asked.device) - before


def _interpreter() -> int:
    """What a worker holds before it has a model."""
    done = subprocess.run(
        [sys.executable, "-c", WORKER], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", done.stdout)[1])
