"""What a node says of itself before it begins, and whether all can run one training. No torch."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from harness.launch.sources import MEASURED, digest
from harness.nodes.files import Order, Ready
from harness.nodes.network import interfaces
from harness.system import kernel, machine
from harness.system.gpus import has_driver
from harness.system.probe import PACKAGES, version

__all__ = ["SKEW_SECONDS", "code", "disagreement", "head_address", "look", "mixed", "skews"]

DRIVER = Path("/proc/driver/nvidia/version")
SKEW_SECONDS = 2.0
SHM, SHM_BYTES = Path("/dev/shm"), 1 << 26
"""What gloo, NCCL and torch put there; a container's default of 64 MiB is the least that works."""


def code() -> str:
    """The sources that all nodes must share."""
    return digest((*MEASURED, "nodes"))


def versions() -> dict[str, str | None]:
    """Python's and those of the packages that decide a number."""
    packages = {name: version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **packages}


def look(order: Order, rank: int) -> Ready:
    """This node, with what stands against the order here: ops are compiled that it asks for."""
    out = Path(order.out)
    here = machine.examine(out, order.ops) if order.ops else machine.look(out)
    ready = Ready(
        token=order.token,
        rank=rank,
        host=socket.gethostname(),
        cores=here.cores,
        memory_bytes=here.container_bytes or here.memory_bytes,
        devices=here.device_names,
        driver=_driver() if has_driver() else "",
        cpu=kernel.cpu_name(),
        code=code(),
        versions=versions(),
        addresses=[a for a in interfaces().values() if not a.startswith("127.")],
        written=time.time(),
    )
    ready.lack = _lack(order, ready, here)
    return ready


def _driver() -> str:
    return DRIVER.read_text(encoding="utf-8").splitlines()[0] if DRIVER.exists() else "unknown"


def _lack(order: Order, ready: Ready, here: machine.Machine) -> str:
    """What this node alone can tell."""
    faults = (here.probe or {}).get("errors", {})
    on_gpus = order.environment.get("CUDA_VISIBLE_DEVICES") != ""
    if on_gpus and len(ready.devices) < order.processes:
        have = f"{len(ready.devices)} GPUs of {order.processes}"
        return f"it has {have}; give fewer --processes, or other nodes"
    busy = next((gpu for gpu in here.gpus if gpu.busy), None) if on_gpus else None
    if busy:
        return f"its GPU {busy.index} is in use: {busy.who()}; wait, or take another node"
    if "probe" in faults:
        return f"its Python does not run torch: {faults['probe']}; set it up alike on all nodes"
    try:
        free = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
    except OSError:
        return ""
    if free < SHM_BYTES // 4:
        return f"its {SHM} has {free >> 20} MiB free; make it larger, or delete what fills it"
    return ""


# ---- all nodes together ----


def disagreement(order: Order, all_ready: Sequence[Ready]) -> str:
    """Why these nodes cannot run one training, with the way out behind "; "; else empty."""
    for ready in all_ready:
        if ready.lack:
            return f"node {ready.rank} ({ready.host}): {ready.lack}"
    for ready in all_ready:
        if ready.code != order.code:
            return (
                f"node {ready.rank} ({ready.host}) has other sources than the leader; "
                "give all nodes the same checkout"
            )
        other = {k: v for k, v in ready.versions.items() if order.versions.get(k) != v}
        if other:
            name, found = next(iter(other.items()))
            return (
                f"node {ready.rank} ({ready.host}) has {name} {found}, the leader "
                f"{order.versions.get(name)}; give all nodes the same packages"
            )
    return "" if head_address(all_ready) else _no_address(all_ready)


def head_address(all_ready: Sequence[Ready]) -> str:
    """The one address at which all others reach the head; empty where there is none."""
    reached = {ready.reached for ready in all_ready if ready.rank}
    return reached.pop() if len(reached) == 1 else ""


def _no_address(all_ready: Sequence[Ready]) -> str:
    ways = {f"node {r.rank}": r.reached for r in all_ready if r.rank}
    said = ", ".join(f"{node}: {way or 'not at all'}" for node, way in ways.items())
    return f"the head is reached by several addresses ({said}); give --head ADDRESS on all nodes"


def mixed(all_ready: Sequence[Ready]) -> str:
    """In what the nodes' devices differ; empty where they are alike. Their times mean nothing."""
    kinds = {tuple(sorted(r.devices)) or (r.cpu,) for r in all_ready}
    if len(kinds) < 2:
        return ""
    said = [f"{r.host}: {', '.join(sorted(set(r.devices))) or r.cpu}" for r in all_ready]
    return f"mixed nodes ({'; '.join(said)})"


def skews(all_ready: Sequence[tuple[Ready, float]]) -> list[str]:
    """A note for each node whose clock is far from the leader's; each with the leader's time when
    its word was first seen. Files that come late look the same."""
    return [
        f"the clock of node {ready.rank} ({ready.host}) differs by some {seen - ready.written:.0f} "
        "s, or its files come late"
        for ready, seen in all_ready
        if abs(seen - ready.written) > SKEW_SECONDS
    ]
