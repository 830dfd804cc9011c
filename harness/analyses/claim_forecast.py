"""Claims at the usual training size: the same rules over predicted rows, beside the measured ones.

A stored forecast is read (``harness.prediction``); nothing is predicted here. A verdict
is "not decided" if the uncertainty of its predictions can change it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from harness.analyses import claim_rules
from harness.analyses.claim_sweeps import Judgement, Rule, Verdict, applied, share
from harness.memory.record import measured
from harness.prediction import Forecast, ForecastRow
from harness.report.data.grid import Grid
from harness.report.data.lookup import Rows
from harness.report.data.rows import Row, Unfinished
from harness.report.figures.numbers import numbers
from harness.report.figures.units import GIB
from harness.result import Categories, Peak, Rank, Result, Status

PEAK_SPREAD = 0.005
"""Relative error of a predicted peak: traces on CPUs are within it, except for ``controlnet``.

Source: docs/explanation/memory.md, checked by tests/predict/test_predict_truth.py.
"""
BASES = {*claim_rules.AGAINST.values(), "single+attend"}
"""Recipes that others are compared with."""
WORDS = {
    Verdict.HOLDS: "holds",
    Verdict.ONLY: "holds only",
    Verdict.NOT: "does not hold",
    Verdict.NEAR: "not decided:",
    Verdict.OPEN: "not predicted",
}
"""Verdict -> its words for a predicted size."""


class ForecastRows(Rows):
    """Rows of a forecast, as the rules look them up.

    ``off`` is the share by which each peak is increased, and each base's peak decreased.
    """

    def __init__(self, forecast: Forecast, off: float = 0.0) -> None:
        self.forecast_rows = {row.spec: row for row in forecast.rows}
        self.rows = [_as_row(row, off) for row in forecast.rows if row.fits]
        self.unfinished = [_unfinished(row, forecast) for row in forecast.rows if not row.fits]
        self.model, self.device = forecast.model, "cuda"

    def times(self, recipe: str, base: str, **fields: object) -> str:
        """Return samples per second relative to ``base``'s, with the range of the uncertainty."""
        return self.rate_ratio(*(self.get(r, **fields) for r in (recipe, base)))

    def rate_ratio(self, row: Row, base: Row) -> str:
        """Return the ratio with the range that ``plan`` uses: half of each step's spread."""
        steps = [self.forecast_rows[of.spec] for of in (row, base)]
        ours, theirs = (
            [step.step_seconds + part * step.spread_seconds for part in (0.5, 0, -0.5)]
            for step in steps
        )
        batches = row.spec.global_batch / base.spec.global_batch
        low, best, high = (batches * b / a for a, b in zip(ours, reversed(theirs), strict=True))
        undecided = ": not decided" if low < 1 < high else ""
        return f"x{best:.2f} (x{low:.2f} to x{high:.2f}{undecided})"

    def _ending(self, unfinished: Unfinished) -> str:
        if unfinished.status is Status.GPU_OOM:
            return f"predicted not to fit: {unfinished.reason}"
        return f"not predicted: {unfinished.reason}"


def _as_row(row: ForecastRow, off: float) -> Row:
    """Return a prediction as a measured row, so that the same rules judge both.

    Its result is never written or ranked, because nothing was run.
    """
    scale = 1 - off if row.spec.recipe in BASES else 1 + off
    parts = Categories(
        **measured(row.categories, row.buckets),
        phase=row.peak_phase,
        where="",
        beyond_state=row.beyond_state_bytes,
    )
    rank = Rank(
        rank=0,
        device="cuda:0",
        phases={"steady": Peak(allocated=round(scale * row.peak_bytes))},
        categories=parts,
        step_seconds=[row.step_seconds],
        warmup_seconds=[],
        phase_seconds={},
        **dict.fromkeys(("baseline_bytes", "host_peak_bytes", "pinned_bytes", "nvme_bytes"), 0),
    )
    counted = row.block_forwards
    facts = {"checkpoint": {"block_forwards": counted}} if counted is not None else {}
    result = Result(status=Status.OK, spec=row.spec, meter="cuda", ranks=[rank], evidence=facts)
    return Row(label=row.spec.recipe, results=(result,), numbers=numbers([result]))


def _unfinished(row: ForecastRow, forecast: Forecast) -> Unfinished:
    """Return a row that would run out of memory, or that cannot be predicted."""
    too_large = row.verdict == "no"
    need = f"{row.need_bytes / GIB:.1f} of {forecast.gpu_bytes / GIB:.1f} GiB" if too_large else ""
    status = Status.GPU_OOM if too_large else Status.UNSUPPORTED
    return Unfinished(
        label=row.spec.recipe,
        status=status,
        reason=need or row.reason,
        so_far_bytes=None,
        result=Result(status=status, spec=row.spec),
    )


def at_size(rules: Sequence[Rule], forecast: Forecast) -> list[Judgement]:
    """Judge each rule by the predictions; "not decided" if their uncertainty changes a verdict."""
    plain, *shifted = (ForecastRows(forecast, off) for off in (0.0, PEAK_SPREAD, -PEAK_SPREAD))
    return [
        _decided(applied(rule, plain), [applied(rule, rows) for rows in shifted]) for rule in rules
    ]


def _decided(found: Judgement, shifted: Sequence[Judgement]) -> Judgement:
    unlike = [other for other in shifted if other.verdict is not found.verdict]
    if not unlike or found.verdict in (Verdict.NEAR, Verdict.OPEN):
        return found
    why = (
        f"as predicted it {words(found)}; with peaks {share(PEAK_SPREAD, 0.0)} off, those that are "
        f"compared in opposite ways, it {words(unlike[0])}"
    )
    return Judgement(Verdict.NEAR, found.numbers, why)


def words(judgement: Judgement) -> str:
    """Return a verdict on a predicted size, in words."""
    return f"{WORDS[judgement.verdict]} {judgement.condition}".strip()


def with_forecast(grid: Grid, rules: Sequence[Rule], forecast: Forecast) -> Grid:
    """Add columns of predicted verdicts and their figures to the table of measured claims."""
    cells = [[words(found), found.numbers] for found in at_size(rules, forecast)]
    heads = (f"At {forecast.model}", "Predicted there")
    return dataclasses.replace(
        grid,
        title=f"{grid.title}; predicted for {_where(forecast)}",
        heads=[*grid.heads, *heads],
        kinds=[*grid.kinds, *("text" for _ in heads)],
        lines=[line + more for line, more in zip(grid.lines, cells, strict=True)],
        note=f"{grid.note}\n\n{_note(forecast)}",
    )


def _where(forecast: Forecast) -> str:
    return f"{forecast.model} on one {forecast.gpu} ({forecast.gpu_bytes / GIB:.1f} GiB)"


def _note(forecast: Forecast) -> str:
    heads = f"At {forecast.model}, Predicted there"
    return (
        f"{heads}: nothing was run. The same rules are applied to the same recipes and "
        f"batches, each predicted for {_where(forecast)} as ./run.sh plan does. Growth "
        "with depth and tokens is at that width. Rows of replicas are on two such cards. "
        "Peaks are those of the traced tensors of a later step. Each peak is known "
        f"within {share(PEAK_SPREAD, 0.0)}, the error of traces on CPUs "
        "(docs/explanation/memory.md); a verdict that such an error changes is not "
        "decided. Brackets behind a speed: the range that half of the plan's uncertainty "
        "of either step leaves; not decided if that range has both faster and slower. No "
        f"verdict rests on a speed. {forecast.assumed}"
    )


def tables(forecast: Forecast) -> list[Grid]:
    """Return the sweeps and growths behind these verdicts."""
    return [
        dataclasses.replace(
            grid,
            key=f"predicted_{grid.key}",
            title=f"Predicted for {forecast.model}: {grid.title[0].lower()}{grid.title[1:]}",
        )
        for grid in claim_rules.tables(ForecastRows(forecast))
    ]
