"""The calibration of one card, driver and torch, as a file. Raw numbers in base units; no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from harness.json_files import BadFile, read_json, write_json
from harness.result import REHEARSED, is_rehearsed
from strategies.base import BadInput

__all__ = [
    "SCHEMA",
    "AttentionRate",
    "Calibration",
    "Ceilings",
    "Collective",
    "Device",
    "MeasuredRow",
    "StandingBytes",
    "Stream",
    "load",
    "public",
]

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Device:
    """What was measured. ``name``: as torch and nvidia-smi say it; of a CPU its processor and
    cores. ``kind``: cuda or cpu. ``driver`` and ``capability`` are of a GPU alone."""

    name: str
    kind: str
    memory_bytes: int
    cores: int
    torch: str
    driver: str = ""
    capability: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Bytes a second that an elementwise operation reaches which moves ``bytes``."""

    bytes: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class AttentionRate:
    """FLOP/s of one kernel of attention, forward and backward, at heads of ``width``.

    ``scratch_bytes``: what its backward takes of the allocator beside its results, measured; and
    ``formula_bytes``: by ``harness.predict.workspace``. None on a CPU.
    """

    kernel: str
    dtype: str
    width: int
    rate: float
    scratch_bytes: int | None = None
    formula_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Collective:
    """An all-reduce among ``ranks`` processes of this machine: seconds of a small one, and bytes a
    second on the wire of each rank of a large one, where it passes twice."""

    ranks: int
    seconds: float
    rate: float


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the device reached; what was not measured is empty or None.

    ``products``: type -> FLOP/s of large square matrix products of random data. ``model_products``:
    the same of products in the shapes of a DiT's block. ``copies``: way ("pinned to device" and the
    like) -> bytes a second. ``launch_seconds``: of an operation that does almost nothing.
    ``host_rate``: bytes a second of host memory.
    """

    products: dict[str, float] = field(default_factory=dict)
    model_products: dict[str, float] = field(default_factory=dict)
    streams: list[Stream] = field(default_factory=list)
    attention: list[AttentionRate] = field(default_factory=list)
    copies: dict[str, float] = field(default_factory=dict)
    launch_seconds: float | None = None
    host_rate: float | None = None
    collective: Collective | None = None


@dataclass(frozen=True, kw_only=True)
class StandingBytes:
    """Bytes that stand beside a training: CUDA's context (on a CPU the interpreter with its
    libraries), cuBLAS's workspaces, and NCCL's. None: not measured."""

    context: int | None = None
    libraries: int | None = None
    communication: int | None = None


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """One recipe that was run and predicted.

    Seconds of a step: ``step_seconds`` measured (median), ``typical_seconds`` as typical figures
    predict it, the three parts as the ceilings predict them, before any fit. Bytes are [predicted,
    measured] pairs: ``step`` of the tensors of a step, ``run`` of the whole run by the meter,
    ``reserved`` by the allocator; ``categories`` of the step. Empty: not known. ``reason``: why
    there is no number.
    """

    recipe: str
    model: str
    processes: int
    global_batch: int
    world: int = 0
    status: str = "ok"
    reason: str = ""
    step_seconds: float | None = None
    compute: float | None = None
    communication: float | None = None
    offload: float | None = None
    typical_seconds: float | None = None
    step: list[int] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    categories: dict[str, list[int]] = field(default_factory=dict)
    flops_per_second: float | None = None
    precision: str = ""
    needs_bytes: int | None = None

    @property
    def label(self) -> str:
        """The recipe, with the world that one process stood for."""
        return f"{self.recipe} of {self.world}" if self.world else self.recipe

    @property
    def timed(self) -> bool:
        """Whether its time tells something of predicted times: a simulated world does not
        communicate."""
        known = self.step_seconds and self.compute is not None
        return bool(known) and not self.world and self.status == "ok"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What one card, driver and torch were measured to do. ``measured``: the day. ``source``: who
    measured it, where that is not the reader. ``load``: how many cores other work kept busy, in
    the mean of the station that had most of it. ``missing``: station -> why it has no numbers."""

    device: Device
    measured: str
    source: str = ""
    load: float = 0.0
    ceilings: Ceilings = field(default_factory=Ceilings)
    standing: StandingBytes = field(default_factory=StandingBytes)
    rows: list[MeasuredRow] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    def write(self, path: Path) -> None:
        """Write atomically."""
        write_json(path, dataclasses.asdict(self))


def public(calibration: Calibration, source: str) -> Calibration:
    """What others can use: numbers and versions, and of what failed only that it did. Reasons may
    hold a machine's paths, and a model file has its own."""
    rows = [
        dataclasses.replace(row, reason="failed" if row.reason else "")
        for row in calibration.rows
        if ".py:" not in row.model
    ]
    missing = dict.fromkeys(calibration.missing, "not measured")
    return dataclasses.replace(calibration, rows=rows, missing=missing, source=source)


def load(path: Path) -> Calibration:
    """Read one.

    Raises:
        BadInput: unreadable, of another schema, or a field of the wrong shape; names the file.
    """
    try:
        found = read_json(path, Calibration, name="calibration", schema=SCHEMA)
    except BadFile as error:
        again = "make it again with ./run.sh calibrate"
        raise BadInput(f"calibration {error}; {again}") from None
    if found.device.name == REHEARSED and not is_rehearsed():
        raise BadInput(f"calibration {path}: of a rehearsed GPU, which is host memory; remove it")
    return found
