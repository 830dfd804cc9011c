"""One station: ``python -m harness.planner.calibrate.stations NAME OUT [--device D] [--small]``.
The collective is measured here: all-reduce among all GPUs of this machine (NCCL), or two processes
on a CPU (gloo). Each rank is this module again."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from harness import ROOT
from harness.json_files import write_json
from harness.launch.command import free_port
from harness.planner.calibrate.stations import kernels
from harness.planner.calibrate.stations.kernels import MIB, Asked
from harness.system import machine
from harness.system.process import die_with_parent

KIB = 2**10
LARGE = {"cuda": 256 * MIB, "cpu": 32 * MIB}
CPU_RANKS = 2
SECONDS = 240


def measure_collective(asked: Asked) -> dict[str, Any]:
    """Return ``collective`` and, on GPUs, the bytes that NCCL holds on each (``communication``)."""
    ranks = asked.ranks if asked.on_gpu else CPU_RANKS
    if ranks < 2:
        return {"missing": {"collective": "one GPU has nobody to communicate with"}}
    words = [sys.executable, "-m", "harness.planner.calibrate.stations", "rank", os.devnull]
    words += ["--device", asked.device.type, *(["--small"] if asked.small else [])]
    env = os.environ | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"OMP_NUM_THREADS": str(max(1, machine.cores() // ranks))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    children = []
    for rank in map(str, range(ranks)):
        own = env | {"RANK": rank, "LOCAL_RANK": rank}
        children.append(subprocess.Popen(words, cwd=ROOT, env=own, text=True, **pipes))
    try:
        said, errors = children[0].communicate(timeout=SECONDS)
    finally:
        for child in children:
            child.kill()
            child.wait()
    if not said.strip():
        raise RuntimeError((errors.strip().splitlines() or ["no answer"])[-1])
    return json.loads(said.strip().splitlines()[-1])


def take_part(asked: Asked) -> dict[str, Any]:
    """Run one rank; the first rank prints the measurements."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if asked.on_gpu else asked.device
    asked = Asked(device=device, small=asked.small, ranks=ranks)
    if asked.on_gpu:
        torch.cuda.set_device(device)
    small = torch.ones(16 * KIB, device=device)
    large = torch.ones((MIB if asked.small else LARGE[device.type]) // 4, device=device)
    before = _beside(asked)
    distributed.init_process_group("nccl" if asked.on_gpu else "gloo")
    seconds = {len(tensor): _reduced(tensor, asked) for tensor in (small, large)}
    held = _beside(asked) - before
    distributed.barrier()
    distributed.destroy_process_group()
    (_, least), (count, most) = sorted(seconds.items())
    rate = 2 * 4 * count * (ranks - 1) / ranks / max(most - least, 1e-6)
    found: dict[str, Any] = {"collective": {"ranks": ranks, "seconds": least, "rate": rate}}
    if asked.on_gpu:
        found["communication"] = max(0, held)
    if rank == 0:
        print(json.dumps(found), flush=True)
    return found


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


def _beside(asked: Asked) -> int:
    """Return the bytes of this GPU that torch's allocator does not hold; 0 on a CPU."""
    if not asked.on_gpu:
        return 0
    free, total = torch.cuda.mem_get_info(asked.device)
    return total - free - torch.cuda.memory_reserved(asked.device)


MEASURES: dict[str, Callable[[Asked], dict[str, Any]]] = {
    "products": kernels.measure,
    "streams": kernels.measure_streams,
    "standing": kernels.measure_overhead,
    "attention": kernels.measure_attention,
    "copies": kernels.measure_copies,
    "collective": measure_collective,
    "rank": take_part,
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
    if not on_gpu and given.name != "rank":
        torch.set_num_threads(machine.cores())
    ranks = torch.cuda.device_count() if on_gpu else 1
    asked = Asked(device=torch.device(given.device), small=given.small, ranks=ranks)
    found = MEASURES[given.name](asked)
    if given.name != "rank":
        write_json(given.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
