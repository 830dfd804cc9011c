"""Bytes a second of elementwise operations and of copies, and the seconds of a launch."""

from __future__ import annotations

from typing import Any

import torch

from harness.calibrate.stations.asked import Asked, seconds_of

__all__ = ["measure", "measure_copies"]

MIB = 2**20
MOVED = {"cuda": (4, 32, 256, 2048), "cpu": (1, 4, 16, 64, 256)}
"""MiB that an operation reads and writes: what is small may stay in a cache."""
SMALL_MOVED = (1, 4)
HOST = 512 * MIB
COPIED = 256 * MIB
TINY = 2000
"""Launches in a row."""


def measure(asked: Asked) -> dict[str, Any]:
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
