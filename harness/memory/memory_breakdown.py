"""Data of one run's anatomy page, as collected by ``harness.memory.dissect``.

Raw numbers in base units (bytes, seconds, FLOPs, elements). Imports no torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.json_files import BadFile, read_json, write_json
from harness.memory.record import MEASURED
from harness.result import BadResult

SCHEMA = 3


@dataclass(kw_only=True)
class Timeline:
    """Live bytes over one step, by category.

    ``op`` counts the operations so far. Each sample is the largest instant since the previous
    sample. ``marks`` are [op, phase].
    """

    op: list[int]
    bytes: dict[str, list[int]]
    marks: list[list[Any]]
    peak_op: int
    peak_phase: str
    peak_maker: str
    peak_module: str
    peak_site: str

    @property
    def peak_bytes(self) -> int:
        """Return the bytes at the peak."""
        return sum(self.at_peak().values())

    def at_peak(self) -> dict[str, int]:
        """Return the bytes of each category at the instant where their sum is largest."""
        totals = [sum(v) for v in zip(*(self.bytes[name] for name in MEASURED), strict=True)]
        at = totals.index(max(totals))
        return {name: self.bytes[name][at] for name in MEASURED}


@dataclass(kw_only=True)
class Lump:
    """Similar storages that are alive at the peak: same category, op and module."""

    category: str
    maker: str
    module: str
    count: int
    bytes: int


@dataclass(kw_only=True)
class Kept:
    """Activations of all modules of one name (``blocks.*.mlp.fc1``) when backward begins.

    ``made``: bytes of storages that the module's forward allocated and that are still alive.
    """

    module: str
    count: int
    made: int


@dataclass(kw_only=True)
class OpCost:
    """All calls of one operation in one phase. ``bytes``: read and written, each operand once."""

    op: str
    phase: str
    calls: int
    flops: int
    bytes: int
    seconds: float


@dataclass(kw_only=True)
class MemoryBreakdown:
    """Data of the page of one run.

    ``peak_flops`` (per second) and ``bandwidth`` (bytes per second) were measured on the device, in
    ``dtype``: by the run itself, or by the calibration that ``ceilings`` names.
    """

    recipe: str
    device: str
    dtype: str
    global_batch: int
    micro_batch: int
    processes: int
    model: str
    tokens: int
    hidden: int
    depth: int
    parameters: int
    timeline: Timeline
    lumps: list[Lump]
    kept: list[Kept]
    ops: list[OpCost]
    peak_flops: float
    bandwidth: float
    ceilings: str = ""
    schema: int = SCHEMA

    def write(self, path: Path) -> None:
        """Write as JSON, atomically."""
        write_json(path, dataclasses.asdict(self))


def load(path: Path) -> MemoryBreakdown:
    """Read one breakdown.

    Raises:
        BadResult: unreadable, or of another schema; names the file.
    """
    try:
        return read_json(path, MemoryBreakdown, name="anatomy", schema=SCHEMA)
    except BadFile as error:
        raise BadResult(str(error)) from None
