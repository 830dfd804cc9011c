"""The columns of the tables of time and of types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.report.data.grid import Column
from harness.report.data.rows import Row
from harness.report.figures import derive
from harness.report.rendering.columns.values import RECIPE, STEP, disturbed_steps, number

__all__ = ["TIME", "TYPES"]


def _compiled(fact: str) -> Callable[[Row], Any]:
    return lambda row: row.first.evidence.get("compile", {}).get(fact)


def _type(key: str) -> Callable[[Row], Any]:
    return lambda row: derive.types(row.first.evidence).get(key) or None


TIME = (
    RECIPE,
    STEP,
    Column("p10 ms", number("step_seconds_p10"), "ms"),
    Column("p90 ms", number("step_seconds_p90"), "ms"),
    Column("Spread %", number("noise_fraction"), "percent"),
    Column("Steps", number("timed_steps"), "count"),
    Column("Disturbed", disturbed_steps),
    Column("CPU s a step", number("step_cpu_seconds_median"), "seconds"),
    Column("Repeats", number("repeats"), "count"),
    Column("Between repeats %", number("repeat_spread_fraction"), "percent"),
    Column("TFLOP/s a device", number("flops_per_second_device"), "tera"),
    Column("Set-up s", number("setup_seconds"), "seconds"),
    Column("Warm-up s", number("warmup_seconds"), "seconds"),
    Column("Compile s", _compiled("compile_seconds"), "seconds"),
    Column("Graph breaks", _compiled("graph_breaks"), "count"),
    Column("Whole run s", number("wall_seconds"), "seconds"),
)
TYPES = (
    RECIPE,
    Column("Products", number("precision")),
    Column("Weights in the model", _type("parameters")),
    Column("Weights that are updated", _type("master")),
    Column("Moments", _type("moments")),
)
