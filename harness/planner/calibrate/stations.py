"""Stations: measurements of one card, ``python -m harness.planner.calibrate.stations NAME OUT``.
Matrix products, attention, memory rates, copies, fixed overhead, and the all-reduce among all GPUs
of this machine (NCCL), or two processes on a CPU (gloo)."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness import ROOT
from harness.json_files import write_json
from harness.launch.command import free_port
from harness.system import gpus, machine
from harness.system.process import die_with_parent

WINDOWS = {"cpu": (0.0005, 1.0), "cuda": (0.2, 1.2)}
"""Seconds of a window of equal calls, and of all windows.
Other work disturbs a CPU, most of all threads that wait for each other; some of many short windows
are undisturbed. A GPU must run long enough to reach its clock under load."""
SMALL = (0.0002, 0.02)
LEAST_WINDOWS = 3


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A device, and ``small`` for a rehearsal: small shapes, whose numbers have no meaning."""

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

    def random(
        self, *shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False
    ) -> torch.Tensor:
        """Return normal random numbers. Zeros or ones take less power and run faster."""
        made = torch.randn(*shape, device=self.device, dtype=torch.float32)
        return made.to(dtype).requires_grad_(requires_grad)


def seconds_of(work: Callable[[], Any], asked: Asked) -> float:
    """Return the seconds of one call: the best of several windows of calls back to back."""
    least, most = SMALL if asked.small else WINDOWS[asked.device.type]
    work()
    once = min(_window(work, asked, 1) for _ in range(LEAST_WINDOWS))
    calls = max(1, math.ceil(least / max(once, 1e-7)))
    best, spent, windows = once, 0.0, 0
    while spent < most or windows < LEAST_WINDOWS:
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
    """Return the first line of a library's error."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {first}"[:200]


# ---- matrix products ----
# FLOP/s on random data by type, for large squares and the shapes of a DiT.


TYPES = {
    "cuda": ("bfloat16", "float16", "tf32", "float32", "float8"),
    "cpu": ("float32", "bfloat16", "float16"),
}
SIDES = {"cuda": (4096, 8192), "cpu": (512, 1024, 2048)}
SMALL_SIDES = (128,)
BLOCK = {"cuda": (8192, 1152), "cpu": (2048, 384)}
"""Tokens of a micro-batch, and width: DiT-XL/2 with 32 samples, and DiT-S with 8."""
SMALL_BLOCK = (128, 64)


def measure(asked: Asked) -> dict[str, Any]:
    """Return ``products`` and ``model_products``, FLOP/s by type; ``missing``: type -> reason."""
    kind = asked.device.type
    sides = SMALL_SIDES if asked.small else SIDES[kind]
    block = SMALL_BLOCK if asked.small else BLOCK[kind]
    squares, blocks, missing = {}, {}, {}
    for name in TYPES[kind]:
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        try:
            squares[name] = max(_square(name, side, asked) for side in sides)
            if name != "float8":  # a model scales its rows one by one
                blocks[name] = _block(name, *block, asked)
        except Exception as error:  # the library has no kernel for this type
            missing[name] = reason(error)
    torch.set_float32_matmul_precision("highest")
    return {"products": squares, "model_products": blocks, "missing": missing}


def _type(name: str) -> torch.dtype:
    return torch.float32 if name == "tf32" else getattr(torch, name)


def _square(name: str, side: int, asked: Asked) -> float:
    if name == "float8":
        a, b = (asked.random(side, side, dtype=torch.float8_e4m3fn) for _ in range(2))
        more = {"out_dtype": torch.bfloat16}
        more |= dict.fromkeys(("scale_a", "scale_b"), torch.ones((), device=asked.device))
        turned = b.t()  # the second operand is column-major
        return 2 * side**3 / seconds_of(lambda: torch._scaled_mm(a, turned, **more), asked)
    a, b = (asked.random(side, side, dtype=_type(name)) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / seconds_of(lambda: torch.mm(a, b, out=out), asked)


def _block(name: str, tokens: int, width: int, asked: Asked) -> float:
    """Return FLOP/s of a block's linear layers, with the two products of each backward."""
    flops, seconds = 0, 0.0
    wide = 4 * width
    for inner, outer in ((width, 3 * width), (width, width), (width, wide), (wide, width)):
        x = asked.random(tokens, inner, dtype=_type(name))
        weight = asked.random(outer, inner, dtype=_type(name))
        grad = asked.random(tokens, outer, dtype=_type(name))
        # Bind the values now: a closure would see the last ones of the loop.
        for product in (
            lambda x=x, weight=weight: x @ weight.t(),
            lambda grad=grad, weight=weight: grad @ weight,
            lambda grad=grad, x=x: grad.t() @ x,
        ):
            seconds += seconds_of(product, asked)
            flops += 2 * tokens * inner * outer
    return flops / seconds


# ---- attention ----
# FLOP/s of each attention kernel by tokens and head width.


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
"""Device -> types and kernels to try."""
WIDTHS = {"cuda": {256: (64, 72), 1024: (64, 128), 4096: (64, 128)}, "cpu": {256: (64, 72)}}
"""Device -> tokens -> head widths. DiT-S, B and L have 64, DiT-XL has 72. Public models have 64 to
128, and up to some ten thousand tokens."""
SHAPE = {"cuda": (8192, 16), "cpu": (2048, 6)}
"""Device -> tokens of all samples, and heads."""
SMALL_SHAPE, SMALL_WIDTHS = (128, 2), {64: (64, 72)}
PASSES = 14
"""Products of T x T x K, times two, in forward (2) and backward (5), as torch's FLOP counter has
them."""


def measure_attention(asked: Asked) -> dict[str, Any]:
    """Return ``attention``: a rate for each kernel, type, number of tokens and width; ``missing``:
    the others, with reasons."""
    types, kernels = HERE[asked.device.type]
    widths = SMALL_WIDTHS if asked.small else WIDTHS[asked.device.type]
    sizes = [(tokens, width) for tokens, some in widths.items() for width in some]
    found, missing = [], {}
    for kernel, dtype, (tokens, width) in itertools.product(kernels, types, sizes):
        if kernel == "math" and tokens > min(widths):  # its scores are tokens squared
            continue
        try:
            found.append(_rate(kernel, dtype, tokens, width, asked))
        except Exception as error:  # the kernel does not support this
            missing[f"{kernel} {dtype} {tokens} {width}"] = reason(error)
    return {"attention": found, "missing": missing}


def _rate(kernel: str, dtype: str, tokens: int, width: int, asked: Asked) -> dict[str, Any]:
    all_tokens, heads = SMALL_SHAPE if asked.small else SHAPE[asked.device.type]
    batch = all_tokens // tokens
    shape = (batch, heads, tokens, width)
    kind = getattr(torch, dtype)
    qkv = [asked.random(*shape, dtype=kind, requires_grad=True) for _ in range(3)]
    grad = asked.random(*shape, dtype=kind)

    def step() -> None:
        out = functional.scaled_dot_product_attention(*qkv)
        torch.autograd.grad(out, qkv, grad)

    with sdpa_kernel(KERNELS[kernel]):
        seconds = seconds_of(step, asked)
    row = {"kernel": kernel, "dtype": dtype, "tokens": tokens, "width": width}
    return {**row, "rate": PASSES * batch * heads * tokens**2 * width / seconds}


# ---- memory rates ----
# Bytes per second of elementwise operations and copies, and the seconds of a launch.


MIB = 2**20
MOVED = {"cuda": (4, 32, 256, 2048), "cpu": (1, 4, 16, 64, 256)}
"""MiB that an operation reads and writes; small sizes may stay in a cache."""
SMALL_MOVED = (1, 4)
HOST = 512 * MIB
COPIED = 256 * MIB
TINY = 2000
"""Launches in a row."""


def measure_streams(asked: Asked) -> dict[str, Any]:
    """Return the rates of memory and launches.
    ``streams`` has [bytes moved, rate], ``launch_seconds`` the time of a launch, and ``host_rate``
    the rate of host memory."""
    sizes = SMALL_MOVED if asked.small else MOVED[asked.device.type]
    streams = [{"bytes": size * MIB, "rate": _stream(size * MIB, asked)} for size in sizes]
    host = Asked(device=torch.device("cpu"), small=asked.small)
    host_rate = _stream(MIB if asked.small else HOST, host) if asked.on_gpu else streams[-1]["rate"]
    one = torch.ones(1, device=asked.device)

    def launches() -> None:
        for _ in range(TINY):
            one.mul_(1.0)

    launch = seconds_of(launches, asked) / TINY
    return {"streams": streams, "launch_seconds": launch, "host_rate": host_rate}


def _stream(moved: int, asked: Asked) -> float:
    """Return bytes per second; half of the bytes are read, and half are written."""
    source = asked.random(moved // 8)
    target = torch.empty_like(source)
    return moved / seconds_of(lambda: torch.mul(source, 1.5, out=target), asked)


def measure_copies(asked: Asked) -> dict[str, Any]:
    """Return bytes per second of pinned and pageable copies between GPU and host, by way."""
    count = (MIB if asked.small else COPIED) // 4
    on_device, rates = torch.ones(count, device=asked.device), {}
    for kind in ("pinned", "pageable"):
        host = torch.ones(count, pin_memory=kind == "pinned")
        there = seconds_of(lambda host=host: on_device.copy_(host, non_blocking=True), asked)
        back = seconds_of(lambda host=host: host.copy_(on_device, non_blocking=True), asked)
        rates |= {f"{kind} to device": 4 * count / there, f"{kind} to host": 4 * count / back}
    return {"copies": rates}


# ---- fixed overhead ----
# Bytes of CUDA's context and cuBLAS's workspaces, or of an interpreter on a CPU.


WORKER = "import harness.train; print(open('/proc/self/status').read())"
USED = "--query-gpu=index,uuid,memory.used"


def measure_overhead(asked: Asked) -> dict[str, Any]:
    """Return ``context`` and ``libraries``, in bytes."""
    if not asked.on_gpu:
        words = [sys.executable, "-c", WORKER]  # what a worker holds before it has a model
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        return {"context": 1024 * int(re.search(r"VmRSS:\s+(\d+)", done.stdout)[1])}
    rows = gpus.rows(gpus.smi(USED), 3)  # of others, before an own CUDA context
    seen = gpus.parse("\n".join(f"{i}, {uuid}, -, 0, {used}" for i, uuid, used in rows), "")
    before = next((gpu.used_bytes for gpu in gpus.chosen(seen)), 0)
    # What stays allocated after products ran in this thread and in autograd's.
    x = asked.random(1024, 1024, dtype=torch.bfloat16, requires_grad=True)
    held = torch.cuda.memory_allocated(asked.device)
    (x @ x).sum().backward()
    x.grad = None
    asked.synchronize()
    libraries = torch.cuda.memory_allocated(asked.device) - held
    del x
    _load_kernels(asked)
    free, total = torch.cuda.mem_get_info(asked.device)
    context = total - free - torch.cuda.memory_reserved(asked.device) - before
    return {"context": max(0, context), "libraries": libraries}


def _load_kernels(asked: Asked) -> None:
    """Take one step of a small model in both types: CUDA loads a kernel when it first runs, and its
    code stays in the context (240 MiB on an H100)."""
    for dtype in (torch.bfloat16, torch.float32):
        x = asked.random(4, 64, 256, dtype=dtype)
        layer = torch.nn.TransformerEncoderLayer(256, 4, batch_first=True)
        layer.to(asked.device, dtype)
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(x).square().mean().backward()
        optimizer.step()
    asked.synchronize()


# ---- collective, and the command ----


KIB = 2**10
LARGE = {"cuda": 256 * MIB, "cpu": 32 * MIB}
CPU_RANKS = 2


def measure_collective(asked: Asked) -> dict[str, Any]:
    """Return ``collective`` and, on GPUs, the bytes that NCCL holds on each (``communication``)."""
    ranks = asked.ranks if asked.on_gpu else CPU_RANKS
    if ranks < 2:
        return {"missing": {"collective": "one GPU has nobody to communicate with"}}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    found = multiprocessing.get_context("spawn").SimpleQueue()
    given = ranks, f"tcp://127.0.0.1:{free_port()}", asked.device.type, asked.small, found
    multiprocessing.spawn(take_part, given, nprocs=ranks)  # raises what a rank raised
    return found.get()


def take_part(rank: int, ranks: int, place: str, kind: str, small: bool, found: Any) -> None:
    """Run one rank; the first one puts the measurements into ``found``."""
    die_with_parent()
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    asked = Asked(device=device, small=small, ranks=ranks)
    if asked.on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, machine.cores() // ranks))
    tiny = torch.ones(16 * KIB, device=device)
    large = torch.ones((MIB if small else LARGE[kind]) // 4, device=device)
    before = _outside_allocator(asked)
    backend = "nccl" if asked.on_gpu else "gloo"
    distributed.init_process_group(backend, init_method=place, rank=rank, world_size=ranks)
    seconds = {len(tensor): _reduced(tensor, asked) for tensor in (tiny, large)}
    held = _outside_allocator(asked) - before
    distributed.barrier()
    distributed.destroy_process_group()
    (_, least), (count, most) = sorted(seconds.items())
    rate = 2 * 4 * count * (ranks - 1) / ranks / max(most - least, 1e-6)
    if rank == 0:
        one = {"collective": {"ranks": ranks, "seconds": least, "rate": rate}}
        found.put(one | ({"communication": max(0, held)} if asked.on_gpu else {}))


def _reduced(tensor: torch.Tensor, asked: Asked) -> float:
    """Return the seconds of one all-reduce; every rank must make equally many."""
    best = float("inf")
    distributed.all_reduce(tensor)
    for _ in range(3 if asked.small else 20):
        distributed.barrier()
        asked.synchronize()
        start = time.perf_counter()
        distributed.all_reduce(tensor)
        asked.synchronize()
        best = min(best, time.perf_counter() - start)
        tensor.fill_(1.0)
    return best


def _outside_allocator(asked: Asked) -> int:
    """Return the bytes of this GPU that torch's allocator does not hold; 0 on a CPU."""
    if not asked.on_gpu:
        return 0
    free, total = torch.cuda.mem_get_info(asked.device)
    return total - free - torch.cuda.memory_reserved(asked.device)


MEASURES: dict[str, Callable[[Asked], dict[str, Any]]] = {
    "products": measure,
    "streams": measure_streams,
    "standing": measure_overhead,
    "attention": measure_attention,
    "copies": measure_copies,
    "collective": measure_collective,
}


def main(argv: Sequence[str]) -> int:
    """Measure and write the numbers; a failure is the exit code and the last line of stderr."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m harness.planner.calibrate.stations")
    parser.add_argument("name", choices=MEASURES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args(argv)
    on_gpu = given.device == "cuda"
    if not on_gpu:
        torch.set_num_threads(machine.cores())
    ranks = torch.cuda.device_count() if on_gpu else 1
    asked = Asked(device=torch.device(given.device), small=given.small, ranks=ranks)
    write_json(given.out, MEASURES[given.name](asked))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
