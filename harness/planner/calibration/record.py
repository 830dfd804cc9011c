"""The calibration of one card, driver and torch, as a file. Raw numbers in base units; no torch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.json_files import BadFile, read_json, write_json
from harness.result import REHEARSED, is_rehearsed
from strategies.base import BadInput

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
    ``formula_bytes``: by ``harness.planner.overhead``. None on a CPU.
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


# ---- residuals ----
# What measured rows tell of predicted times: a factor for each part, and how far off rows stay.
#
# Ceilings are of single operations, and a step is not their sum: caches, launches and other
# threads are left out alike for all recipes. So each part of a predicted time (computing,
# communicating, offloading) gets one factor: those that bring the rows' relative errors to their
# least squares, together, and none below ``LOWEST``. What then remains between predicted and
# measured is the uncertainty of the next prediction. Pure functions; no torch.


PARTS = ("compute", "communication", "offload")
SHARE = 0.10
"""Of a predicted step: a part with more must have a factor for the row to tell of the others."""
TOLD, TELLERS = 0.02, 2
"""Of a predicted step, and rows: a part gets a factor where as many rows have so much of it."""
LOWEST = 0.1
"""The least that a factor can be."""
LEAST = 3
"""Rows in which parts are fitted; fewer say nothing of the next one."""
FLOOR = 0.03
"""The least uncertainty that is claimed: steps themselves differ by as much."""
STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782)
"""Student's t within which 90 % lie, for 1 to 12 degrees of freedom."""
NORMAL = 1.645


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Part -> its factor, and -> the share by which nine of ten predictions are off at the most;
    parts that were not fitted are in neither. ``rows``: how many tell of the share."""

    factors: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    rows: int = 0


def fitted(rows: Sequence[MeasuredRow]) -> Fitted:
    """Factors and uncertainty of the rows that were timed; empty where they are too few."""
    timed = [row for row in rows if row.timed]
    if len(timed) < LEAST:
        return Fitted()
    parts = [part for part in PARTS if _told(timed, part)]
    told = [row for row in timed if all(_share(row, p) < SHARE or p in parts for p in PARTS)]
    freedom = len(told) - len(parts)
    if "compute" not in parts or freedom < 1:
        return Fitted()
    factors = _factors(told, parts)
    misses = [_miss(row, factors) for row in told]
    return Fitted(
        factors=factors, shares=dict.fromkeys(factors, _within(misses, freedom)), rows=len(told)
    )


def predicted_seconds(row: MeasuredRow, factors: Mapping[str, float]) -> float:
    """A row's step by its ceilings and these factors."""
    return sum(factors.get(part, 1.0) * (getattr(row, part) or 0.0) for part in PARTS)


def left_out_errors(rows: Sequence[MeasuredRow]) -> dict[str, float]:
    """Label -> error of the row's predicted time where the factors were fitted to the others alone:
    what a row that was not there would have met. None where the others are too few."""
    timed = [row for row in rows if row.timed]
    errors = {}
    for row in timed:
        others = fitted([other for other in timed if other is not row])
        if others.rows:
            errors[row.label] = predicted_seconds(row, others.factors) / row.step_seconds - 1
    return errors


def _factors(rows: Sequence[MeasuredRow], parts: Sequence[str]) -> dict[str, float]:
    """The factors by which the rows' relative errors are least in squares: of what is left beyond
    the least factor of each, by those that are not negative."""
    shares = [[(getattr(row, p) or 0.0) / row.step_seconds for p in parts] for row in rows]
    rest = [_unfitted(row, parts) / row.step_seconds for row in rows]
    left = [1 - more - LOWEST * sum(own) for own, more in zip(shares, rest, strict=True)]
    choices = itertools.chain.from_iterable(
        itertools.combinations(range(len(parts)), size) for size in range(len(parts) + 1)
    )
    solved = [_solved(shares, left, chosen) for chosen in choices]
    best = min((s for s in solved if s is not None), key=lambda s: _squares(shares, left, s))
    return {part: LOWEST + more for part, more in zip(parts, best, strict=True)}


def _unfitted(row: MeasuredRow, parts: Sequence[str]) -> float:
    """Seconds of the parts that get no factor."""
    return sum(getattr(row, part) or 0.0 for part in PARTS if part not in parts)


def _solved(
    shares: Sequence[Sequence[float]], left: Sequence[float], chosen: Sequence[int]
) -> list[float] | None:
    """Least squares in the ``chosen`` unknowns, the others 0; None where one would be negative or
    the rows do not tell them apart. By normal equations: there are three unknowns at the most."""
    matrix = [[math.fsum(row[i] * row[j] for row in shares) for j in chosen] for i in chosen]
    target = [math.fsum(row[i] * y for row, y in zip(shares, left, strict=True)) for i in chosen]
    found = _gauss(matrix, target)
    if found is None or any(value < 0 for value in found):
        return None
    whole = [0.0] * len(shares[0])
    for place, value in zip(chosen, found, strict=True):
        whole[place] = value
    return whole


def _gauss(matrix: list[list[float]], target: list[float]) -> list[float] | None:
    """The solution of a small symmetric system; None where it is singular."""
    size = len(target)
    rows = [[*line, value] for line, value in zip(matrix, target, strict=True)]
    for i in range(size):
        if rows[i][i] < 1e-12:
            return None
        for j in range(size):
            if j != i:
                factor = rows[j][i] / rows[i][i]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]


def _squares(
    shares: Sequence[Sequence[float]], left: Sequence[float], factors: Sequence[float]
) -> float:
    def off(row: Sequence[float], y: float) -> float:
        return sum(a * b for a, b in zip(row, factors, strict=True)) - y

    return math.fsum(off(row, y) ** 2 for row, y in zip(shares, left, strict=True))


def _told(rows: Sequence[MeasuredRow], part: str) -> bool:
    """Whether enough rows have the part; one beside computing must be more in some than in others,
    or nothing tells the two apart."""
    shares = [_share(row, part) for row in rows]
    enough = sum(share >= TOLD for share in shares) >= TELLERS
    return enough and (part == "compute" or max(shares) - min(shares) >= TOLD)


def _share(row: MeasuredRow, part: str) -> float:
    whole = predicted_seconds(row, {})
    return (getattr(row, part) or 0.0) / whole if whole else 0.0


def _miss(row: MeasuredRow, factors: Mapping[str, float]) -> float:
    return math.log(row.step_seconds / predicted_seconds(row, factors))


def _within(misses: Sequence[float], freedom: int) -> float:
    """The share that holds nine of ten further rows, by Student's t."""
    deviation = math.sqrt(math.fsum(miss * miss for miss in misses) / freedom)
    student = STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL
    return max(FLOOR, math.expm1(student * deviation * math.sqrt(1 + 1 / len(misses))))
