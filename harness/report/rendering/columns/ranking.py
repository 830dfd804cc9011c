"""The columns of the rankings, and of the rows that did not finish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.report.data import nodes, speed
from harness.report.data.grid import Column
from harness.report.data.rows import Row, Unfinished
from harness.report.figures import parity, units
from harness.report.figures.numbers import Numbers
from harness.report.rendering.columns.values import (
    HOSTED,
    NEED,
    NEED_CHANGE,
    PEAK,
    RECIPE,
    RESIDENT,
    STEP,
    disturbed_steps,
    number,
    versus,
)
from harness.report.rendering.drawn import LATENCY, PSNR, SAMPLES

__all__ = ["RANKING", "SHORT", "SIMULATED", "UNFINISHED"]


# ---- values ----


def _speed_ratio(alike: str) -> Callable[[Row], Any]:
    """The ratio to the reference's; ``alike`` where the noise explains it."""

    def take(row: Row) -> Any:
        return alike if row.versus.speed_differs is False else versus("speed_ratio")(row)

    return take


SECOND = 1.02
"""What the second step must hold, of the first, to be noted: a peak of one step is too low."""


def flags(row: Row) -> str:
    """What a reader must know about a row before its numbers."""
    words = ["front"] if row.versus.front else []
    words += ["noisy"] if row.numbers.noisy else []
    words += [f"{disturbed_steps(row)} steps disturbed"] if row.numbers.disturbed_steps else []
    words += ["network paused?"] if any(map(nodes.paused_steps, row.results)) else []
    words += [row.versus.parity] if row.versus.wrong else []
    words += [kind] if (kind := parity.computation(row.first)) else []
    return ", ".join([*words, *_of_the_peak(row), *row.notes])


def _of_the_second_step(found: Numbers) -> list[str]:
    first, steady = found.first_step_metered_bytes, found.steady_metered_bytes
    if not first or not steady or steady < SECOND * first:
        return []
    return [f"second step +{100 * (steady / first - 1):.0f} % memory"]


def _of_the_peak(row: Row) -> list[str]:
    """Why a row has no peak, or one that has host memory in it; on a GPU what the second step adds
    to the first, which begins without optimizer state."""
    if row.first.meter == "cuda":
        return [] if row.drawn else _of_the_second_step(row.numbers)
    if row.numbers.peak_bytes is None:
        return ["not traced: see Resident"]
    return ["places unknown"] if (row.numbers.placed_by or "").startswith("unknown") else []


def _without_gpu(name: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row.numbers, name) if row.first.meter != "cuda" else None


def loss_cell(row: Row) -> str | None:
    """The parity verdict, with the distance wherever it is not equality; of a training."""
    if row.drawn is not None:
        return None
    word, distance = row.versus.parity, row.versus.loss_distance
    if word in ("by design", "beyond design", "DIFFERS") and distance is not None:
        return f"{word} {units.one('distance', distance)}"
    return word


def p10_p90(row: Row) -> str:
    """Both ends of the step time's spread, in ms."""
    ends = [row.numbers.step_seconds_p10, row.numbers.step_seconds_p90]
    return " to ".join(units.column("ms", ends))


# ---- tables ----

RANK = Column("#", lambda r: r.versus.rank, "count")
SPEED = Column("Samples/s", number("samples_per_second"), "rate")
SPEED_RATIO = Column("x ref", _speed_ratio(speed.NONE_SEEN), "ratio")
SHORT_SPEED_RATIO = Column("x ref", _speed_ratio(speed.ALIKE), "ratio")
HOST = Column("Host GiB", number("host_total_bytes"), "gib")
MFU = Column("MFU %", number("mfu_fraction"), "percent")
LOSS = Column("Loss vs ref", loss_cell)
FLAGS = Column("Notes", flags, "flag")

RANKING = (
    RANK,
    RECIPE,
    SPEED,
    SPEED_RATIO,
    STEP,
    Column("p10 to p90 ms", p10_p90),
    LATENCY,
    PEAK,
    NEED,
    NEED_CHANGE,
    HOSTED,
    RESIDENT,
    HOST,
    MFU,
    LOSS,
    SAMPLES,
    PSNR,
    FLAGS,
)
SIMULATED = (
    RANK,
    RECIPE,
    PEAK,
    NEED,
    NEED_CHANGE,
    HOSTED,
    RESIDENT,
    Column("Reserved GiB", number("reserved_peak_bytes"), "gib"),
    HOST,
    Column("Step ms, no communication", number("step_seconds_median"), "ms"),
    Column("Notes", lambda r: "simulated"),
)
SHORT = (
    RANK,
    RECIPE,
    SPEED,
    SHORT_SPEED_RATIO,
    STEP,
    # What rows are ranked by, under its name: without a GPU there is no more to need.
    Column("Peak GiB", _without_gpu("peak_bytes"), "gib"),
    NEED,
    NEED_CHANGE,
    LOSS,
    SAMPLES,
    FLAGS,
)


# ---- rows that did not finish ----


def _phase(unfinished: Unfinished) -> str | None:
    """Where it ended: the phase, and the step within it."""
    phase, step = unfinished.result.phase, unfinished.result.step
    return phase if phase is None or step is None else f"{phase}, step {step}"


def _fit_words(unfinished: Unfinished) -> str | None:
    fit = unfinished.predicted_fit
    return fit and ("yes" if fit.fits else "no")


UNFINISHED = (
    Column("Recipe", lambda u: u.label),
    Column("Status", lambda u: u.status.value),
    Column("In", _phase),
    Column("So far GiB", lambda u: u.so_far_bytes, "gib"),
    Column("Predicted need GiB", lambda u: u.predicted_fit and u.predicted_fit.need_bytes, "gib"),
    Column("Memory GiB", lambda u: u.predicted_fit and u.predicted_fit.have_bytes, "gib"),
    Column("Predicted to fit", _fit_words),
    Column("Why", lambda u: u.reason),
    Column("Way out", lambda u: u.result.way_out),
)
