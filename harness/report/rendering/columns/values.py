"""What several tables take of a row, and the columns that stand in more than one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.report.data.grid import Column
from harness.report.data.rows import Row

__all__ = [
    "HOSTED",
    "NEED",
    "NEED_CHANGE",
    "PEAK",
    "RECIPE",
    "RESIDENT",
    "STEP",
    "disturbed_steps",
    "number",
    "versus",
]


def number(name: str) -> Callable[[Row], Any]:
    """A field of a row's ``Numbers``."""
    return lambda row: getattr(row.numbers, name)


def versus(name: str) -> Callable[[Row], Any]:
    """A field of what a row is beside the reference; nothing of the reference itself."""
    return lambda row: None if row.versus.is_reference else getattr(row.versus, name)


def _on_gpu(name: str) -> Callable[[Row], Any]:
    """A number that is shown of a GPU's rows alone, where it has a meaning of its own."""
    return lambda row: getattr(row.numbers, name) if row.first.meter == "cuda" else None


def disturbed_steps(row: Row) -> str | None:
    """In how many timed steps the machine was elsewhere; None where that was not counted."""
    marked = row.numbers.disturbed_steps
    return None if marked is None else f"{marked} of {row.numbers.timed_steps}"


RECIPE = Column("Recipe", lambda r: r.label)
STEP = Column("Step ms", number("step_seconds_median"), "ms")
PEAK = Column("Peak GiB", number("peak_bytes"), "gib")
NEED = Column("Needs GiB", _on_gpu("need_bytes"), "gib")
NEED_CHANGE = Column("vs ref %", versus("need_change_fraction"), "change")
HOSTED = Column("On host GiB", number("hosted_bytes"), "gib")
RESIDENT = Column("Resident GiB", number("resident_peak_bytes"), "gib")
