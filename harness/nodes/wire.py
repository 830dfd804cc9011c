"""The network between nodes, measured: all-reduces of one process a node, by torch's own backend.

    python -m harness.nodes.wire --rank R --nodes N --head ADDRESS --port P --out FILE

Without it a slow link looks like a slow recipe: at 50 Mbit/s a small step takes 17 times as long,
with the same losses. On GPUs the backend is NCCL, which chooses its own way between the nodes.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from harness.json_files import write_json
from harness.result import Wire
from harness.system import process

__all__ = ["main"]

LARGEST = 1 << 26
SMALL, TIMES = 30, 4
SECONDS = 1.5
"""About what the large all-reduces may take: over a slow link fewer bytes are sent."""
GROUP_SECONDS = 60


def main(argv: Sequence[str]) -> int:
    """Entry point: rank 0 writes a ``harness.result.Wire``."""
    process.die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m harness.nodes.wire")
    for name in ("rank", "nodes", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(argv)
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=f"tcp://{options.head}:{options.port}",
        rank=options.rank,
        world_size=options.nodes,
        timeout=datetime.timedelta(seconds=GROUP_SECONDS),
    )
    found = measured(options.device, backend, options.nodes)
    if options.rank == 0:
        write_json(options.out, vars(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def measured(device: str, backend: str, nodes: int) -> Wire:
    """Latency of the smallest all-reduce, and bytes a second sent in a large one."""
    for _ in range(3):
        timed(8, device)
    latency = statistics.median(timed(8, device) for _ in range(SMALL))
    size = fitting_size(timed(1 << 20, device), device)
    seconds = min(timed(size, device) for _ in range(TIMES))
    # A ring: each node sends 2 (n - 1) / n of the bytes.
    sent = 2 * (nodes - 1) / nodes * size
    return Wire(
        backend=backend,
        latency_seconds=latency,
        bandwidth=sent / seconds,
        size_bytes=size,
    )


def fitting_size(seconds_of_a_mib: float, device: str) -> int:
    """The bytes that ``TIMES`` all-reduces move in about ``SECONDS``: a power of two from 1 MiB to
    64 MiB, the same on all nodes."""
    longest = torch.tensor([seconds_of_a_mib], dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    mib = max(1.0, SECONDS / TIMES / float(longest))
    return min(LARGEST, 1 << (20 + int(mib).bit_length() - 1))


def timed(size: int, device: str) -> float:
    """Seconds of one all-reduce of ``size`` bytes, begun together."""
    data = torch.zeros(size // 4, device=device)
    dist.barrier()
    _wait(device)
    began = time.perf_counter()
    dist.all_reduce(data)
    _wait(device)
    return time.perf_counter() - began


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
