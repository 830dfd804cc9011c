"""Calibration of one card, driver and torch: its file, and the fit of predicted to measured times.
Numbers are raw, in base units. Does not import torch."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import RUN
from harness.json_files import BadFile, read_json, write_json
from strategies.base import BadInput

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Device:
    """The calibrated device. ``kind``: cuda or cpu.
    ``name``: as torch and nvidia-smi report it; for a CPU, its processor and cores. ``driver`` and
    ``capability`` are set only for a GPU."""

    name: str
    kind: str
    memory_bytes: int
    cores: int
    torch: str
    driver: str = ""
    capability: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Bytes per second of an elementwise operation that moves ``bytes``."""

    bytes: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class AttentionRate:
    """FLOP/s of a kernel of attention, both ways, at heads of ``width`` and ``tokens``."""

    ENDED = ("scratch_bytes", "formula_bytes")
    """Fields of older calibrations."""

    kernel: str
    dtype: str
    width: int
    rate: float
    tokens: int = 256


@dataclass(frozen=True, kw_only=True)
class Collective:
    """All-reduce among ``ranks`` processes of this machine.
    ``seconds``: of a small one. ``rate``: bytes per second on the wire of each rank of a large one,
    which it crosses twice."""

    ranks: int
    seconds: float
    rate: float


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Measured rates of the device; a rate that was not measured is empty or None.
    ``products``: dtype -> FLOP/s of large square matrix products of random data.
    ``model_products``: the same in the shapes of a DiT block. ``copies``: way ("pinned to device"
    and the like) -> bytes per second. ``launch_seconds``: of an operation that does almost nothing.
    ``host_rate``: bytes per second of host memory."""

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
    """Fixed bytes of a training beside its tensors; None: not measured.
    ``context``: CUDA's context, or on a CPU the interpreter with its libraries. ``libraries``:
    cuBLAS's workspaces. ``communication``: NCCL's buffers."""

    context: int | None = None
    libraries: int | None = None
    communication: int | None = None


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """One recipe that was run and predicted.
    ``step_seconds``: measured seconds of a step (median). ``compute``, ``communication``,
    ``offload``: predicted from the ceilings, before any fit. ``operations``: kernels that the host
    issues in a step, if a GPU runs them.
    ``reason``: why there are no numbers."""

    ENDED = ("world", "step", "run", "reserved", "categories", "flops_per_second", "precision",
             "needs_bytes", "typical_seconds")  # fmt: skip
    """Fields of older calibrations."""

    recipe: str
    model: str
    processes: int
    global_batch: int
    status: str = "ok"
    reason: str = ""
    step_seconds: float | None = None
    compute: float | None = None
    communication: float | None = None
    offload: float | None = None
    operations: int = 0

    @property
    def timed(self) -> bool:
        """True if the measured time can be compared with a predicted one."""
        known = self.step_seconds and self.compute is not None
        return bool(known) and self.status == "ok"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measurements of one card, driver and torch.
    ``measured``: the day. ``source``: who measured it, if not the reader. ``load``: cores that
    other work kept busy, as the mean of the station with the most of it. ``missing``: station ->
    why it has no numbers."""

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
        """Write the calibration to ``path`` atomically."""
        write_json(path, dataclasses.asdict(self))


def load(path: Path) -> Calibration:
    """Read the calibration in ``path``.

    Raises:
        BadInput: unreadable, of another schema, or a field of the wrong shape; names the file.
    """
    try:
        return read_json(path, Calibration, name="calibration", schema=SCHEMA)
    except BadFile as error:
        again = f"make it again with {RUN} calibrate"
        raise BadInput(f"calibration {error}; {again}") from None


# ---- Fit of predicted times ----
# Ceilings are of single operations, and a step is not their sum. Each part of a predicted time
# (compute, communication, offload) therefore gets one factor of at least ``LOWEST``. The factors
# minimize the squared relative errors of all rows together. The largest error that remains is the
# uncertainty of the next prediction.
#
# A GPU waits if the host issues operations more slowly than the GPU runs them. Such rows tell the
# host's seconds of one operation, and nothing of the GPU. Which rows they are is tried out: the
# rows with the most operations for their work, as many of them as leave the smallest errors. One
# row alone is no sign: any time is some host's.


PARTS = ("compute", "communication", "offload")
SHARE = 0.10
"""Share of a predicted step. A row with a larger part that has no factor is left out of the fit."""
TOLD, TELLERS = 0.02, 2
"""Share of a predicted step, and number of rows. A part gets a factor if that many rows have at
least that share of it. A host's time needs that many rows too."""
LOWEST = 0.1
"""Smallest factor."""
LEAST = 3
"""Fewest rows that are fitted."""
FLOOR = 0.03
"""Smallest uncertainty that is reported: measured steps themselves differ by as much."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Result of a fit. A part that was not fitted has no entry.
    ``factors``: part -> its factor. ``shares``: part -> the error that no fitted row exceeds, at
    least ``FLOOR``. ``rows``: number of fitted rows. ``host``: seconds in which the host issues one
    operation; 0 if no row shows it."""

    factors: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    rows: int = 0
    host: float = 0.0


def predicted_seconds(row: MeasuredRow, factors: Mapping[str, float], host: float = 0.0) -> float:
    """Return a row's predicted seconds per step, from its ceilings, these factors and the host."""
    device = sum(factors.get(part, 1.0) * (getattr(row, part) or 0.0) for part in PARTS)
    return max(device, host * row.operations)


def fitted(rows: Sequence[MeasuredRow]) -> Fitted:
    """Return the factors and uncertainty of the timed rows; empty if there are too few."""

    def waiting(row: MeasuredRow) -> float:
        seconds = predicted_seconds(row, {})
        return row.operations / seconds if seconds else 0.0

    timed = sorted((row for row in rows if row.timed), key=waiting, reverse=True)
    known = sum(row.operations > 0 for row in timed)
    tried = (_tried(timed[:bound], timed[bound:]) for bound in (0, *range(TELLERS, known + 1)))
    found = [one for one in tried if one is not None]
    # A fit that leaves rows out is no better for it.
    return min(found, key=lambda one: (-one[1].rows, one[0]))[1] if found else Fitted()


def _tried(
    waits: Sequence[MeasuredRow], rest: Sequence[MeasuredRow]
) -> tuple[float, Fitted] | None:
    """Return the mean squared error of a fit in which ``waits`` wait for the host, and the fit.
    None if the ``rest`` are too few."""
    parts = []
    for part in PARTS:
        shares = [_share(row, part) for row in rest]
        enough = sum(share >= TOLD for share in shares) >= TELLERS
        # A part other than compute must also vary between rows: else no fit separates the two.
        if enough and (part == "compute" or max(shares) - min(shares) >= TOLD):
            parts.append(part)
    fitted_rows = [row for row in rest if all(_share(row, p) < SHARE or p in parts for p in PARTS)]
    freedom = len(waits) + len(fitted_rows) - len(parts) - bool(waits)
    too_few = len(rest) < LEAST or len(fitted_rows) <= len(parts) or freedom < 1
    if too_few or "compute" not in parts:
        return None
    factors = _factors(fitted_rows, parts)
    host = statistics.median(r.step_seconds / r.operations for r in waits) if waits else 0.0
    counted = [*waits, *fitted_rows]
    errors = [math.log(r.step_seconds / predicted_seconds(r, factors, host)) for r in counted]
    share = max(FLOOR, math.expm1(max(map(abs, errors))))
    named = [*factors, *(["overhead"] if waits else [])]
    found = Fitted(
        factors=factors, shares=dict.fromkeys(named, share), rows=len(counted), host=host
    )
    return math.fsum(error * error for error in errors) / freedom, found


def _share(row: MeasuredRow, part: str) -> float:
    seconds = predicted_seconds(row, {})
    return (getattr(row, part) or 0.0) / seconds if seconds else 0.0


def _factors(rows: Sequence[MeasuredRow], parts: Sequence[str]) -> dict[str, float]:
    """Return the factors, at least ``LOWEST``, that minimize the rows' squared relative errors."""
    from scipy.optimize import nnls  # plans without a calibration need no scipy

    shares = [[(getattr(row, part) or 0.0) / row.step_seconds for part in parts] for row in rows]
    lowest = {part: LOWEST if part in parts else 1.0 for part in PARTS}
    left = [1 - predicted_seconds(row, lowest) / row.step_seconds for row in rows]
    best, _ = nnls(shares, left)
    return {part: LOWEST + float(more) for part, more in zip(parts, best, strict=True)}
