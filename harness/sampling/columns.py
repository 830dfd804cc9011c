"""Columns of rows that draw samples, and the sentence on their shared setting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from harness.report.data.grid import Column
from harness.report.data.rows import Group, Row
from harness.report.figures import units
from harness.report.rendering.explanations import model_in_words


def setting(group: Group) -> str:
    spec, first = group.reference.spec, group.reference.first
    weights = f"weights of {spec.weights}" if spec.weights else "weights as they are drawn"
    guidance = f"guidance {spec.scale:g}" if spec.scale != 1 else "no guidance"
    return (
        f"Samples of {model_in_words(spec)} ({first.parameters / 1e6:.1f} M parameters, {weights}) "
        f"in the shape of {spec.data}, {spec.objective} objective, {spec.drawn_steps} steps of its "
        f"sampler, {guidance}, {spec.global_batch} samples a batch, seed {spec.seed}, "
        f"{spec.warmup} warm-up + {spec.steps} timed batches"
    )


def drawn_cell(row: Row) -> str | None:
    """Return the verdict on samples, with their relative distance if they differ."""
    if row.drawn is None:
        return None
    word, away = row.versus.parity, row.drawn.away
    far = away is not None and word in ("by design", "DIFFERS")
    return f"{word} {units.one('distance', away.relative)}" if far else word


def _drawn(name: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row.drawn, name, None)


def _away(name: str) -> Callable[[Row], Any]:
    return lambda row: getattr(getattr(row.drawn, "away", None), name, None)


def psnr(row: Row) -> Any:
    """Return the PSNR in decibels; "same" if no bit differs."""
    found = _away("psnr_db")(row)
    return "same" if found == math.inf else found


def _metered(phase: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row.numbers, f"{phase}_metered_bytes")


RECIPE = Column("Recipe", lambda row: row.label)
LATENCY = Column("Latency of one ms", _drawn("latency_seconds"), "ms")
SAMPLES = Column("Samples vs ref", drawn_cell)
PSNR = Column("PSNR dB", psnr, "ratio")
DRAWING_PHASES = (
    RECIPE,
    Column("Load GiB", _metered("load"), "gib"),
    Column("Prepare GiB", _metered("prepare"), "gib"),
    Column("Warm-up GiB", _metered("first_step"), "gib"),
    Column("Denoise GiB", _metered("steady"), "gib"),
)
DRAWN = (
    RECIPE,
    Column("Promised", lambda r: r.first.parity),
    Column("Relative L2", _away("relative"), "distance"),
    Column("Worst sample", _away("worst"), "distance"),
    PSNR,
    Column("Recognised %", _drawn("recognised"), "percent"),
    Column("Taken as reference's %", _drawn("agreed"), "percent"),
    Column("Equal up to", _drawn("limit"), "distance"),
    Column("Echo of a last bit", _drawn("echo"), "distance"),
    Column("Evaluations", _drawn("evaluations"), "count"),
    Column("Verdict", lambda r: r.versus.parity),
    Column("Differs in", lambda r: r.versus.differs_in or None),
)
