"""The claims at the size that was predicted: recorded predictions as rows, judged by the rules
that the measured rows are judged by, and again with peaks a little off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.recount.cells import GIB
from tests.recount.lookup import Missing, Rows
from tests.recount.predicted import SUMS
from tests.recount.raw import Group, Row, Run
from tests.recount.sweeps import HOLDS, NOT, ONLY, OPEN, Judged

__all__ = ["ForecastRows", "at_size", "place", "ruled"]

OFF = 0.005
"""By which share a predicted peak may be off, as the page says."""
COMPARED_WITH = ("single", "ddp", "single+ema:place=none", "single+attend")
SAID = {HOLDS: "holds", ONLY: "holds only", NOT: "does not hold", OPEN: "not predicted"}
UNDECIDED = "not decided:"
"""What stands for every other verdict."""


class ForecastRows(Rows):
    """The recorded rows that would train on the card."""

    def __init__(self, forecast: dict[str, Any], off: float = 0.0) -> None:
        self.model, self.device = forecast["model"], "cuda"
        self.card = forecast["gpu_bytes"]
        self.ends, self.rows, self.told = {}, [], {}
        for found in forecast["rows"]:
            key = str(sorted(found["spec"].items()))
            if found["verdict"] not in ("fits", "tight") or found["peak_bytes"] is None:
                self.ends[key] = found
                continue
            lower = found["spec"]["recipe"] in COMPARED_WITH
            self.rows.append(as_row(found, 1 - off if lower else 1 + off))
            self.told[key] = found

    def get(self, recipe: str, **spec: Any) -> Row:
        fits, name = self.wanted(recipe, spec)
        for row in self.rows:
            if fits(row):
                return row
        gone = (found for found in self.ends.values() if fits(as_row(found, 1.0)))
        for found in gone:
            if found["verdict"] == "no":
                sizes = [f"{size / GIB:.1f}" for size in (found["need_bytes"], self.card)]
                raise Missing(f"{name} is predicted not to fit: {sizes[0]} of {sizes[1]} GiB")
            raise Missing(f"{name} is not predicted: {found['reason']}")
        raise Missing(f"{name} is not among the results")

    def pace(self, row: Row, base: Row) -> str:
        return self.rates(row, base)

    def rates(self, row: Row, base: Row) -> str:
        """Between ours slow and theirs quick, and the other way round: half of each spread."""
        ours, theirs = (self.told[str(sorted(it.spec.items()))] for it in (row, base))
        found = []
        for side in (1, 0, -1):
            mine = ours["step_seconds"] + side * ours["spread_seconds"] / 2
            other = theirs["step_seconds"] - side * theirs["spread_seconds"] / 2
            here, there = row.spec["global_batch"] / mine, base.spec["global_batch"] / other
            found.append(here / there)
        least, likely, most = found
        open_ = ": not decided" * (least < 1 < most)
        return f"x{likely:.2f} (x{least:.2f} to x{most:.2f}{open_})"


def as_row(found: dict[str, Any], scale: float) -> Row:
    """In the form of a measured row."""
    fine, held = found["categories"], found["peak_bytes"]
    parts = {name: sum(fine.get(n, 0) for n in names) for name, names in SUMS.items()}
    parts[found["buckets"]] += fine.get("buckets", 0)
    rank = {
        "device": "cuda:0",
        "phases": {"steady": {"allocated": held and round(scale * held)}},
        "categories": {**parts, "beyond_state": found["beyond_state_bytes"]},
        "step_seconds": [found["step_seconds"]],
    }
    facts = {"checkpoint": {"block_forwards": found["block_forwards"]}}
    data = {"spec": found["spec"], "ranks": [rank], "evidence": facts, "meter": "cuda"}
    group = Group(None)
    group.rows.append(Row([Run(data, None)], group))
    return group.rows[0]


Rule = Callable[[Rows], Judged]


def ruled(rule: Rule, rows: Rows) -> Judged:
    """A rule's verdict, or why there is none."""
    try:
        return rule(rows)
    except Missing as why:
        return OPEN, "", str(why)


def at_size(rule: Rule, forecast: dict[str, Any]) -> tuple[str, str]:
    """The verdict as it is worded, and the figures."""
    plain = ruled(rule, ForecastRows(forecast))
    known, numbers = SAID.get(plain[0]), plain[2]
    if plain[0] in (HOLDS, ONLY, NOT):
        for off in (OFF, -OFF):
            other = ruled(rule, ForecastRows(forecast, off))
            if other[0] != plain[0]:
                text = (
                    f"{UNDECIDED} as predicted it {worded(plain)}; with peaks 0.5% off, those "
                    f"that are compared in opposite ways, it {worded(other)}"
                )
                return text, numbers
    return (worded(plain) if known else f"{UNDECIDED} {plain[1]}"), numbers


def worded(found: Judged) -> str:
    return f"{SAID.get(found[0], UNDECIDED)} {found[1]}".strip()


def place(forecast: dict[str, Any]) -> str:
    """What was predicted, and for which card."""
    size = f"{forecast['gpu_bytes'] / GIB:.1f} GiB"
    return f"{forecast['model']} on one {forecast['gpu']} ({size})"
