"""Before the first row: what each node has, whether all can run one training, and their network."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.cluster.meeting import End, Order, Ready, log_of
from harness.cluster.network import interfaces
from harness.json_files import BadFile, read_json
from harness.launch import launch
from harness.launch.command import HEAD, INTERFACE, PORT, RANK
from harness.launch.sources import MEASURED, digest
from harness.result import Wire
from harness.system import machine
from harness.system.gpus import has_driver
from harness.system.probe import PACKAGES, version
from strategies.base import GPUS, BadInput, Reason

DRIVER = Path("/proc/driver/nvidia/version")
LATENCY_SECONDS = 1e-3
"""An all-reduce over any local network takes less."""
BANDWIDTH = 100e6
"""Bytes a second: gigabit Ethernet, below which gradients of the smallest models wait."""


def code() -> str:
    """Return a hash of the sources that all nodes must share."""
    return digest((*MEASURED, "cluster"))


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide a number."""
    packages = {name: version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **packages}


def look(order: Order, rank: int) -> Ready:
    """Return this node, with its ops compiled and what it lacks for the order."""
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
        cpu=machine.cpu_name(),
        code=code(),
        versions=versions(),
        addresses=[a for a in interfaces().values() if not a.startswith("127.")],
    )
    ready.lack = _lack(order, here)
    return ready


def _driver() -> str:
    return DRIVER.read_text(encoding="utf-8").splitlines()[0] if DRIVER.exists() else "unknown"


def _lack(order: Order, here: machine.Machine) -> Reason | None:
    """Return what this node lacks; None if it lacks nothing."""
    if order.environment.get("CUDA_VISIBLE_DEVICES") != "":
        if len(here.gpus) < order.processes:
            have = f"it has {len(here.gpus)} GPUs of {order.processes}"
            return Reason(have, "give fewer --processes, or other nodes", about=GPUS)
        for gpu in here.gpus:
            if gpu.busy:
                used = f"its GPU {gpu.index} is in use: {gpu.who()}"
                return Reason(used, "wait, or take another node")
    faults = (here.probe or {}).get("errors", {})
    if "probe" in faults:
        text = f"its Python does not run torch: {faults['probe']}"
        return Reason(text, "set up the same environment on all nodes")
    return None


# ---- all nodes together ----


def disagreement(order: Order, all_ready: Sequence[Ready]) -> Reason | None:
    """Return why these nodes cannot run one training; None if they can."""
    for ready in all_ready:
        who = f"node {ready.rank} ({ready.host})"
        if ready.lack:
            return dataclasses.replace(ready.lack, text=f"{who}: {ready.lack.text}")
        if ready.code != order.code:
            hint = "use the same checkout on all nodes"
            return Reason(f"{who} has different sources from node 0's", hint)
        for name, found in ready.versions.items():
            if order.versions.get(name) != found:
                theirs = f"{name} {found}, the leader {order.versions.get(name)}"
                return Reason(f"{who} has {theirs}", "install the same packages on all nodes")
    if head_address(all_ready):
        return None
    said = ", ".join(f"node {r.rank}: {r.reached or 'not at all'}" for r in all_ready if r.rank)
    text = f"the head is reached by several addresses ({said})"
    return Reason(text, "give --head ADDRESS on all nodes")


def head_address(all_ready: Sequence[Ready]) -> str:
    """Return the one address at which all others reach the head; empty if there is none."""
    reached = {ready.reached for ready in all_ready if ready.rank}
    return reached.pop() if len(reached) == 1 else ""


def mixed(all_ready: Sequence[Ready]) -> str:
    """Return how the nodes' devices differ (their times then mean nothing); else empty."""
    if len({tuple(sorted(r.devices)) or (r.cpu,) for r in all_ready}) < 2:
        return ""
    said = [f"{r.host}: {', '.join(sorted(set(r.devices))) or r.cpu}" for r in all_ready]
    return f"mixed nodes ({'; '.join(said)})"


# ---- the network, measured like a row ----


def wire_words(device: str, nodes: int) -> list[str]:
    """Return a launch's words that measure the network."""
    words = [os.path.abspath(sys.executable), "-m", "harness.cluster.network", "--rank", RANK]
    return [*words, "--nodes", str(nodes), "--head", HEAD, "--port", PORT, "--device", device]


def wire_environment(device: str) -> dict[str, str]:
    """Return the variables of that launch."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {"GLOO_SOCKET_IFNAME": INTERFACE, **hidden}


def wire_found(folder: Path, ends: dict[int, End | None]) -> Wire:
    """Return the network as it was measured.

    Raises:
        BadInput: it was not, with the last line of a log.
    """
    with contextlib.suppress(BadFile):
        return read_json(folder / "wire.json", Wire, name="wire")
    logs = [launch.read_log(folder / log_of(rank)).strip() for rank in ends]
    last = next((text.splitlines()[-1][:200] for text in logs if text), "no message")
    ways = ", ".join(f"node {rank}: {end.interface}" for rank, end in ends.items() if end)
    raise BadInput(
        f"the nodes could not exchange data over torch's network (interfaces: {ways}): "
        f"{last}. Set HEADROOM_INTERFACE to the interface between them. Logs: {folder}"
    )


def slow(wire: Wire) -> list[str]:
    """Return notes on a network that would decide a comparison."""
    found = []
    if wire.bandwidth < BANDWIDTH:
        found.append(f"{wire.bandwidth / 1e6:.1f} MB/s, below gigabit Ethernet")
    if wire.latency_seconds > LATENCY_SECONDS:
        found.append(f"an all-reduce of 8 bytes takes {wire.latency_seconds * 1e3:.1f} ms")
    return [f"slow network between the nodes: {why}: times are the network's" for why in found]
