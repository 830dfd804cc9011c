"""Predicted beside measured, from the predictions' raw files."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from tests.recount.measures import CATEGORIES, peak_of, traced_total
from tests.recount.raw import Row

__all__ = ["Part", "errors_of", "parts", "run_error", "run_measured", "run_predicted"]
__all__ += ["step_error", "step_predicted", "step_traced", "worst"]

SUMS = {
    "parameters": ("parameters", "gathered"),
    "gradients": ("gradients",),
    "optimizer_state": ("optimizer_state",),
    "ema": ("ema",),
    "activations": ("activations", "autocast"),
    "workspace": ("temporaries", "recomputed"),
}
"""Category of a report -> those of a prediction that it sums; buckets count where the prediction
says."""
TITLES = {name: name.replace("_", " ") for name in CATEGORIES} | {"ema": "EMA"}


@dataclass(frozen=True)
class Part:
    """One category of one row's step."""

    row: Row
    name: str
    predicted: int
    traced: int

    @property
    def title(self) -> str:
        return TITLES[self.name]

    @property
    def error(self) -> float:
        return self.predicted / self.traced - 1 if self.traced else math.inf


def prediction(row: Row) -> dict[str, Any] | None:
    return next((run.prediction for run in row.runs if run.prediction), None)


def traced(row: Row) -> dict[str, Any] | None:
    """Rank 0 of the first repetition, which a prediction stands for."""
    rank = row.first["ranks"][0]
    return rank if rank["categories"] else None


def step_predicted(row: Row) -> int | None:
    steady = prediction(row)["steady"]
    return steady and steady["bytes"]


def step_traced(row: Row) -> int | None:
    return traced(row) and traced_total(traced(row))


def ratio_error(predicted: int | None, measured: int | None) -> float | None:
    return predicted / measured - 1 if predicted and measured else None


def step_error(row: Row) -> float | None:
    return ratio_error(step_predicted(row), step_traced(row))


def run_predicted(row: Row) -> int | None:
    """Without a GPU; on one, libraries' workspaces are added, which no raw file has."""
    found = prediction(row)
    if row.group.gpu:
        raise LookupError("predictions for a GPU are not recounted")
    return found["allocated"] or (found["peak"] and found["peak"]["bytes"])


def run_measured(row: Row) -> int | None:
    return peak_of(row.first["ranks"])


def run_error(row: Row) -> float | None:
    return ratio_error(run_predicted(row), run_measured(row))


def parts(row: Row) -> list[Part]:
    """The categories of a step above 5 % of its traced peak, predicted or traced."""
    found, rank = prediction(row), traced(row)
    if not found or not found["steady"] or not rank:
        return []
    fine, own = found["steady"]["categories"], rank["categories"]
    buckets = found.get("buckets") or (
        "gradients" if row.recipe.startswith("zero") else "workspace"
    )
    every = []
    for name, names in SUMS.items():
        size = sum(fine[n] for n in names) + (fine["buckets"] if name == buckets else 0)
        every.append(Part(row, name, size, own[name]))
    least = 0.05 * traced_total(rank)
    return [part for part in every if max(part.predicted, part.traced) > least]


def worst(row: Row) -> Part | None:
    return max(parts(row), key=lambda part: abs(part.error), default=None)


def errors_of(errors: list[float | None]) -> tuple[float, float, int]:
    """Median and largest of the absolute errors, and how many they are."""
    known = [abs(error) for error in errors if error is not None]
    return statistics.median(known), max(known), len(known)
