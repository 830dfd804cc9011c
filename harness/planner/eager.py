"""Recipes with ``compile``, which are predicted as their eager rows. No torch.
No graph of a compiler is traced. A compiled step of the same recipe uses less memory and time, so a
verdict by the eager row is on the safe side; only the lower ends of its ranges are wider
(``verdict.Fit.low_bytes``, ``roofline.seconds``)."""

from __future__ import annotations

import dataclasses

from harness.prediction import Prediction
from harness.resolve import Resolved, resolve
from strategies.base import Slot

NOTE = (
    "compiled: as the eager row; compiled steps use less memory and time, by how much is not "
    "predicted"
)
MORE = {
    "records": "the pool of its CUDA graphs is not counted",
    "budgets": "what its budget recomputes takes time that is not counted",
}
"""What a setting of ``compile`` adds to the eager row -> a further note."""


def of(row: Resolved) -> Resolved:
    """Return the row without ``compile``; the same object if it has none, or is refused."""
    part = row.recipe.in_slot(Slot.COMPILE)
    if part is None or row.refusal:
        return row
    words = [word for word in row.spec.recipe.split("+") if word.partition(":")[0] != part.name]
    return resolve(dataclasses.replace(row.spec, recipe="+".join(words)))


def told(row: Resolved, found: Prediction) -> Prediction:
    """Return the prediction of the eager row as the one of ``row``."""
    if not (note := note_of(row)):
        return found
    return dataclasses.replace(found, recipe=str(row.recipe), notes=[note, *found.notes])


def note_of(row: Resolved) -> str:
    """Return what a compiled row's prediction leaves out; empty for any other row."""
    part = row.recipe.in_slot(Slot.COMPILE)
    if part is None:
        return ""
    also = {"records": part.records, "budgets": part.budget < 1}
    return "; ".join([NOTE, *(MORE[name] for name, has in also.items() if has)])
