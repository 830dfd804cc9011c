"""The columns of what was predicted, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.report.data.grid import Column
from harness.report.data.rows import Row
from harness.report.rendering.columns.values import RECIPE

__all__ = ["CALIBRATED", "CATEGORY_ERRORS", "PREDICTED"]


def _predicted(name: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row.predicted, name)


def _worst(name: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row.predicted.worst, name, None)


def _seconds(row: Row, name: str) -> float | None:
    return getattr(row.calibrated.predicted, name, None)


PREDICTED = (
    RECIPE,
    Column("By", _predicted("method")),
    Column("Step, predicted GiB", _predicted("step_predicted"), "gib"),
    Column("Step, traced GiB", _predicted("step_measured"), "gib"),
    Column("Step error %", _predicted("step_error"), "error"),
    Column("Worst category", _worst("title")),
    Column("Its error %", _worst("error"), "error"),
    Column("Host, predicted GiB", _predicted("hosted_predicted"), "gib"),
    Column("Host, traced GiB", _predicted("hosted_measured"), "gib"),
    Column("Host error %", _predicted("hosted_error"), "error"),
    Column("Run, predicted GiB", _predicted("run_predicted"), "gib"),
    Column("Run, measured GiB", _predicted("run_measured"), "gib"),
    Column("Run error %", _predicted("run_error"), "error"),
    Column("Reserved, predicted GiB", _predicted("reserved_predicted"), "gib"),
    Column("Reserved, measured GiB", _predicted("reserved_measured"), "gib"),
    Column("Reserved error %", _predicted("reserved_error"), "error"),
    Column("Why no trace", _predicted("reason")),
)
CALIBRATED = (
    RECIPE,
    Column("Step, predicted ms", lambda row: _seconds(row, "total"), "ms"),
    Column("Plus or minus ms", lambda row: _seconds(row, "spread"), "ms"),
    Column("Step, measured ms", lambda row: row.calibrated.measured_seconds, "ms"),
    Column("Time error %", lambda row: row.calibrated.error, "error"),
    Column("By typical figures %", lambda row: row.calibrated.typical_error, "error"),
    Column("Measured peak reached %", lambda row: row.calibrated.peak_fraction, "percent"),
)
CATEGORY_ERRORS = (
    Column("Recipe", lambda pair: pair[0].label),
    Column("Category", lambda pair: pair[1].title),
    Column("Predicted GiB", lambda pair: pair[1].predicted, "gib"),
    Column("Traced GiB", lambda pair: pair[1].measured, "gib"),
    Column("Error %", lambda pair: pair[1].error, "error"),
)
