"""The columns of rows beside others: what each part does, and whether the same was computed."""

from __future__ import annotations

from harness.report.data import effect_reasons, speed
from harness.report.data.grid import Column
from harness.report.figures import parity
from harness.report.rendering.columns.values import RECIPE, versus

__all__ = ["EFFECTS", "PARITY", "SIBLINGS"]

EFFECTS = (
    Column("Adding", lambda e: e.words),
    Column("to", lambda e: e.base.label),
    Column("Samples/s x", lambda e: speed.ratio(e.row, e.base), "ratio"),
    Column("Memory %", lambda e: e.need_change_fraction, "change"),
    Column("Why", effect_reasons.why),
)
SIBLINGS = (
    RECIPE,
    Column("Alters by design", lambda r: parity.design(r.first)),
    Column("Computation", lambda r: parity.computation(r.first) or None),
    Column("Sibling", lambda r: r.versus.sibling),
    Column("Loss distance", lambda r: r.versus.sibling_loss_distance, "distance"),
    Column("Gradient norm distance", lambda r: r.versus.sibling_norm_distance, "distance"),
)
PARITY = (
    RECIPE,
    Column("Promised", lambda r: r.first.parity),
    Column("Loss distance", versus("loss_distance"), "distance"),
    Column("Gradient norm distance", versus("grad_norm_distance"), "distance"),
    Column("Moment distance", versus("moment_distance"), "distance"),
    Column("Update distance", versus("update_distance"), "distance"),
    Column("Average distance", versus("average_distance"), "distance"),
    Column("Verdict", lambda r: r.versus.parity),
    Column("Differs in", lambda r: r.versus.differs_in or None),
    Column("First loss", lambda r: r.first.losses[0] if r.first.losses else None, "loss"),
    Column("Last loss", lambda r: r.first.losses[-1] if r.first.losses else None, "loss"),
)
