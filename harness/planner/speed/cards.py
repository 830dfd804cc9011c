"""Common GPUs: memory, bandwidths and peaks, from ``cards.json``. No torch."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.planner.calibration.record import Device
from harness.planner.calibration.store import Applied
from strategies.base import BadInput

TABLE = Path(__file__).with_name("cards.json")
UNITS = {"gib": 2**30, "g": 2**30, "gb": 10**9, "mib": 2**20, "m": 2**20, "mb": 10**6, "": 2**30}
COLUMNS = {
    "float16": "fp16_tflops",
    "bfloat16": "bf16_tflops",
    "float32": "fp32_tflops",
    "tf32": "tf32_tflops",
}
"""Type of a matrix product -> column of the table."""
OFF = 0.12
"""Share by which a card's memory may differ from the size in its name."""
NODE = 8
"""GPUs of a machine, where nothing else is said."""
DESKTOP_HOST, SERVER_HOST = 64 * 2**30, 256 * 2**30
"""Bytes of host memory assumed for each GPU: of a desktop card, and a GPU's share of a server."""
DESKTOP_MEMORY = 32 * 2**30
"""A card that is known by its memory alone is a desktop's up to this size."""
CORE_FLOPS, CORE_BANDWIDTH, CPU_BANDWIDTH = 64e9, 10e9, 200e9
"""Of a CPU that nothing is known of but its cores: FLOP/s of each in float32 (AVX2 at 2 GHz), and
bytes a second of each and of all."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card. Bytes, bytes a second (each direction), dense FLOP a second.

    ``memory_bytes``: what CUDA reports as the device's total. Bandwidths are of its memory, of
    the link between GPUs of one node, of the network between nodes, and of copies to host memory.
    ``capability``: NVIDIA's compute capability; None where it is not known.
    ``peaks``: what its units reach in float16, bfloat16, float32 and tf32; None without the unit.
    ``pattern`` finds the card in a device's name, of which ``device`` is one.
    ``hopper``: cuBLAS takes larger workspaces from this generation on.
    ``like``: the card whose speed is assumed, where only a memory size was asked for.
    ``timed``: measured step times on this card were compared with predictions.
    ``shared``: a CPU, whose cores, memory and bandwidth all processes share.
    ``calibrated``: what it was measured to do, which then counts and not the figures above.
    ``node``: GPUs of one machine; more meet over the network. ``network_told``: where that one's
    bandwidth was measured; empty: a typical figure.
    ``beside``: bytes of models that stay on each card beside the training
    (``harness.planner.resident_models``), as ``beside_told`` says.
    ``host_memory``: bytes of a machine's host memory, as ``host_told`` says; 0: assumed by the kind
    of card.
    """

    name: str
    pattern: str
    device: str
    capability: tuple[int, int] | None
    memory_bytes: int
    bandwidth: float
    peaks: Mapping[str, float | None]
    link_bandwidth: float
    network_bandwidth: float
    hopper: bool
    host_bandwidth: float
    like: str = ""
    timed: bool = False
    shared: bool = False
    calibrated: Applied | None = None
    node: int = NODE
    network_told: str = ""
    beside: int = 0
    beside_told: str = ""
    host_memory: int = 0
    host_told: str = ""

    @property
    def host_share(self) -> int:
        """Bytes of host memory assumed for each GPU."""
        alone = self.memory_bytes <= DESKTOP_MEMORY if self.like else "RTX" in self.name
        return DESKTOP_HOST if alone else SERVER_HOST

    def host_bytes(self, processes: int) -> int:
        """Bytes of host memory that one machine has for its part of so many processes."""
        return self.host_memory or self.host_share * min(self.node, processes)

    @property
    def words(self) -> str:
        """Name and memory, as a sentence has them."""
        size = f"{self.memory_bytes / 2**30:.1f} GiB"
        if self.like:
            return f"{size} (speed assumed: {self.like})"
        return f"{self.name} ({size}{', times untried' if self.untried else ''})"

    @property
    def untried(self) -> bool:
        """True if no measured step time of this card was compared with a prediction."""
        return not (self.timed or self.shared or self.calibrated)

    def flops(self, dtype: str, tf32: bool = False) -> float:
        """Peak FLOP/s of matrix products in ``dtype``; float32's where there is no such unit."""
        kind = "tf32" if tf32 and dtype == "float32" else dtype
        return self.peaks.get(kind) or self.peaks["float32"] or 0.0


@functools.cache
def table() -> dict[str, Card]:
    """Name -> card."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["gpus"]
    return {
        row["name"]: Card(
            name=row["name"],
            pattern=row["pattern"],
            device=row["device"],
            capability=_capability(row),
            memory_bytes=int(row["memory_gib"] * 2**30),
            bandwidth=row["bandwidth_gb_s"] * 1e9,
            peaks={kind: _flops(row[column]) for kind, column in COLUMNS.items()},
            link_bandwidth=row["link_gb_s"] * 1e9,
            network_bandwidth=row["network_gb_s"] * 1e9,
            hopper=(_capability(row) or (0, 0))[0] in (9, 10),
            host_bandwidth=row["host_gb_s"] * 1e9,
            timed=row.get("timed", False),
        )
        for row in rows
    }


def find(name: str) -> Card:
    """The card of that name, however it is spelled.

    Raises:
        BadInput: unknown; names the nearest.
    """
    known = {_plain(key): gpu for key, gpu in table().items()}
    if _plain(name) in known:
        return known[_plain(name)]
    if f"rtx{_plain(name)}" in known:
        return known[f"rtx{_plain(name)}"]
    starts = [gpu for key, gpu in known.items() if _begins(key, _plain(name))]
    if len(starts) == 1 and _plain(name):
        return starts[0]
    if starts and _plain(name):
        some = ", ".join(gpu.name for gpu in starts)
        raise BadInput(f"gpu {name!r} is several cards; one of {some}")
    size = re.search(r"(\d+) ?GB?\b", name, re.IGNORECASE)
    calls = named(name.replace("-", " "), int(size[1]) * 2**30 if size else 0)
    if calls and (not size or abs(calls.memory_bytes / 2**30 / int(size[1]) - 1) < OFF):
        return calls
    digits = [key for key in table() if re.findall(r"\d+", key) == re.findall(r"\d+", name)]
    close = difflib.get_close_matches(name.upper(), digits, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "./run.sh list cards shows what there is."
    raise BadInput(f"unknown gpu {name!r}; {hint} Or give its memory, as --gpu-memory 24GiB")


def _begins(key: str, word: str) -> bool:
    """Return True if only a memory size or a make follows ``word``: a Ti is another card."""
    return key.startswith(word) and not re.match(r"ti|super|d\b", key[len(word) :])


def named(device: str, memory_bytes: int = 0) -> Card | None:
    """The card that calls itself ``device``, as nvidia-smi and torch say it; None if unknown.
    Cards of one name and several sizes are told apart by ``memory_bytes`` (0: the first).

    A MIG slice is none of them: it has a share of its card's units and memory.
    """
    if re.search(r"\bMIG\b", device):
        return None
    known = table().values()
    match = next((gpu for gpu in known if re.search(gpu.pattern, device, re.IGNORECASE)), None)
    if match is None or not memory_bytes:
        return match
    same = (gpu for gpu in known if gpu.pattern == match.pattern)
    return min(same, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))


def of_size(size: int) -> Card:
    """A card known by its memory alone. Its speed is that of ``alike``'s first, and nothing is
    assumed of what it can run."""
    like = alike(size)[0]
    name = f"{size / 2**30:.4g} GiB"
    given = {"memory_bytes": size, "like": like.name, "capability": None, "timed": False}
    return dataclasses.replace(like, name=name, **given)


def alike(size: int) -> list[Card]:
    """The table's cards that are nearest to ``size`` bytes to a GiB, the slowest first. Each has
    bfloat16: without that unit, products in 16 bits would be told at float32's speed."""
    able = [gpu for gpu in table().values() if gpu.peaks["bfloat16"]]

    def off(gpu: Card) -> int:
        return round(abs(gpu.memory_bytes - size) / 2**30)

    near = [gpu for gpu in able if off(gpu) == min(map(off, able))]
    return sorted(near, key=lambda gpu: gpu.peaks["bfloat16"])


def of_cpu(name: str, cores: int, memory_bytes: int) -> Card:
    """A CPU of that many cores: typical figures, until it is calibrated."""
    flops, bandwidth = CORE_FLOPS * cores, min(CORE_BANDWIDTH * cores, CPU_BANDWIDTH)
    return Card(
        name=name,
        pattern="",
        device="cpu",
        capability=None,
        memory_bytes=memory_bytes,
        bandwidth=bandwidth,
        peaks={**dict.fromkeys(COLUMNS), "float32": flops, "bfloat16": flops},
        link_bandwidth=bandwidth,
        network_bandwidth=bandwidth,
        hopper=False,
        host_bandwidth=bandwidth,
        shared=True,
    )


def of_device(device: Device) -> Card:
    """The card that was calibrated: the table's; one that is not there, by what was measured."""
    if device.kind == "cpu":
        return of_cpu(device.name, device.cores, device.memory_bytes)
    known = named(device.name, device.memory_bytes)
    if known is not None:
        return known
    capability = (device.capability[0], device.capability[1]) if device.capability else None
    near = of_size(device.memory_bytes)
    return dataclasses.replace(
        near, name=device.name, device=device.name, like="", capability=capability
    )


def with_calibration(card: Card, found: Applied | None) -> Card:
    """``card`` as it was measured; as it is where there is no calibration."""
    return dataclasses.replace(card, calibrated=found) if found else card


def parse_bytes(text: str, option: str = "gpu-memory") -> int:
    """``24GiB``, ``80GB``, ``40g`` or ``24`` (GiB) as bytes; ``option`` is named where it is none.

    Raises:
        BadInput: not a size above zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = UNITS.get(match[2].lower()) if match else None
    size = int(float(match[1]) * unit) if unit else 0
    if size <= 0:
        raise BadInput(f"{option} is {text!r}; write a size as in 24GiB or 80GB")
    return size


def size_words(size: int) -> str:
    """Bytes as ``parse_bytes`` reads them back, to the byte."""
    for unit, scale in (("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20)):
        if size % scale == 0:
            return f"{size // scale}{unit}"
    return f"{size / 2**30!r}GiB"


def _capability(row: Mapping[str, Any]) -> tuple[int, int] | None:
    return tuple(row["capability"]) if row["capability"] else None


def _flops(tflops: float | None) -> float | None:
    return None if tflops is None else tflops * 1e12


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
