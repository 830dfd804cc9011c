"""The numbers that a GPU must show, each judged by what was measured. Pure; no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.calibration.record import Calibration, MeasuredRow
from strategies import parse

__all__ = ["GOALS", "Goal", "Judged", "judged"]

ONE, SHARDED, RESERVED = 0.03, 0.05, 0.10
PEAK = 0.55
LOW_BYTES, LOW_BATCH, LOW_SPEED = 7 * 2**30, 128, 0.84
"""fast-DiT's published speed of DiT-XL/2 at batch 128 on an A100, steps a second."""
METER = 0.01
LARGE = "DiT-XL/2"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A goal beside what was measured. ``met``: None where nothing was measured, for ``why``."""

    text: str
    measured: str
    met: bool | None

    @property
    def word(self) -> str:
        return {True: "met", False: "not met", None: "unmeasured"}[self.met]


Found = tuple[str, bool | None]
"""What was measured, in words, and whether the goal is met."""


@dataclass(frozen=True)
class Goal:
    """A goal, and how it is judged of a calibration and the meter's cost (a share of a step)."""

    text: str
    judge: Callable[[Calibration, float | None], Found]


def judged(calibration: Calibration, meter: float | None = None) -> list[Judged]:
    """Every goal. A CPU can meet none of them."""
    if calibration.device.kind != "cuda":
        why = "no GPU was measured"
        return [Judged(text=goal.text, measured=why, met=None) for goal in GOALS]
    found = [(goal.text, *goal.judge(calibration, meter)) for goal in GOALS]
    return [Judged(text=text, measured=measured, met=met) for text, measured, met in found]


def _sharded(row: MeasuredRow) -> bool:
    return row.world > 1 or row.processes > 1


def _worst(rows: Sequence[MeasuredRow], name: str, limit: float) -> Found:
    """The largest error of a pair of bytes among these rows."""
    errors = {
        row.label: abs(pair[0] / pair[1] - 1)
        for row in rows
        if len(pair := getattr(row, name)) == 2
    }
    if not errors:
        return "no such row was measured and predicted", None
    label = max(errors, key=errors.__getitem__)
    return f"{100 * errors[label]:.1f} % ({label}; {len(errors)} rows)", errors[label] <= limit


def _one_gpu(found: Calibration, meter: float | None) -> Found:
    return _worst([row for row in found.rows if not _sharded(row)], "run", ONE)


def _many_gpus(found: Calibration, meter: float | None) -> Found:
    return _worst([row for row in found.rows if _sharded(row)], "run", SHARDED)


def _reserved(found: Calibration, meter: float | None) -> Found:
    return _worst(found.rows, "reserved", RESERVED)


def _peak(found: Calibration, meter: float | None) -> Found:
    """The best row of the large model that computes in bfloat16."""
    products = found.ceilings.products.get("bfloat16")
    rows = [
        row
        for row in found.rows
        if row.model == LARGE and row.precision == "bfloat16" and row.flops_per_second
        and not row.world
    ]  # fmt: skip
    if not products or not rows:
        return f"no row of {LARGE} in bfloat16 beside measured products", None
    best = max(rows, key=lambda row: row.flops_per_second / row.processes)
    share = best.flops_per_second / best.processes / products
    return f"{100 * share:.0f} % ({best.label})", share >= PEAK


def _low(found: Calibration, meter: float | None) -> Found:
    """The quickest row within the bytes; where none is within, the leanest."""
    rows = [
        row
        for row in found.rows
        if row.model == LARGE and row.global_batch == LOW_BATCH and not _sharded(row)
        and row.step_seconds and row.needs_bytes
    ]  # fmt: skip
    if not rows:
        return f"no row of {LARGE} at batch {LOW_BATCH}", None
    lean = [row for row in rows if row.needs_bytes <= LOW_BYTES]
    best = min(lean or rows, key=lambda r: r.step_seconds if lean else r.needs_bytes)
    speed = 1 / best.step_seconds
    words = f"{best.needs_bytes / 2**30:.2f} GiB at {speed:.2f} steps/s ({parse(best.recipe).text})"
    return words, bool(lean) and speed >= LOW_SPEED


def _meter(found: Calibration, meter: float | None) -> Found:
    if meter is None:
        return "the meter's cost was not measured", None
    return f"{100 * meter:.2f} % of a step", meter < METER


GOALS = (
    Goal(f"allocated memory predicted within {100 * ONE:.0f} % on one GPU", _one_gpu),
    Goal(f"allocated memory predicted within {100 * SHARDED:.0f} % sharded", _many_gpus),
    Goal(f"reserved memory predicted within {100 * RESERVED:.0f} %", _reserved),
    Goal(f"{LARGE} in bf16 at {100 * PEAK:.0f} % of the measured matmul peak, best recipe", _peak),
    Goal(
        f"global batch {LOW_BATCH} of {LARGE} on one GPU in at most {LOW_BYTES >> 30} GiB, at "
        f"{LOW_SPEED} steps/s or more",
        _low,
    ),
    Goal("the meter below 1 % of a step", _meter),
)
