"""Single rows by what they ran, for stories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.recount import measures as m
from tests.recount import noise
from tests.recount import versus as v
from tests.recount.raw import ResultSet, Row, Run

__all__ = ["Missing", "Rows", "beyond_state", "state_share", "step_bytes", "times"]

STATE = ("parameters", "gradients", "optimizer_state", "ema")
WRITTEN = {"single+backward:call=retain_graph": "single+backward"}
"""Recipe with a value that is the usual one -> as results may have it."""


class Missing(LookupError):
    """What a story needs was not measured: which, and why."""


def step_bytes(row: Row) -> int:
    """The peak of one step: the allocator's on a GPU, the traced tensors' without one."""
    return known(m.peak_bytes(row), f"{row.label} was not traced")


def beyond_state(row: Row) -> int:
    """The most that a step held at once beyond its state."""
    why = f"{row.label} was not traced, or by an older version"
    return known(m.category("beyond_state")(row), why)


def state_share(row: Row) -> float:
    """Parameters, gradients, optimizer state and average as a share of the peak of a step."""
    if m.fullest(row) is None:
        raise Missing(f"{row.label} was not traced")
    return sum(m.category(name)(row) for name in STATE) / step_bytes(row)


def known(size: int | None, why: str) -> int:
    if size is None:
        raise Missing(why)
    return size


def times(row: Row, base: Row) -> str:
    """A ratio of speeds in a sentence."""
    if noise.differ(row, base) is False:
        return "no difference seen"
    return f"x{m.samples_per_second(row) / m.samples_per_second(base):.2f}"


class Rows:
    """Every row of a set; of the first group's model, unless another is asked for."""

    def __init__(self, results: ResultSet) -> None:
        self.results = results
        self.rows = [row for group in results.ordered for row in v.ranked(group)]
        first = results.ordered[0].reference.spec
        self.model, self.device = first["model"], first["device"]

    def get(self, recipe: str, **spec: Any) -> Row:
        """The row of ``recipe`` whose spec has these values."""
        fits, name = self.wanted(recipe, spec)
        row = next((row for row in self.rows if fits(row)), None)
        ended = next((run for run in self.results.unfinished if fits(run)), None)
        if row:
            return row
        if ended:
            reason = self.reason(ended)
            raise Missing(f"{name} is {ended.status}: {reason}")
        raise Missing(f"{name} is not among the results")

    def pace(self, row: Row, base: Row) -> str:
        """A ratio of speeds of two rows that did the same work."""
        return times(row, base)

    def rates(self, row: Row, base: Row) -> str:
        """The same of rows that did unlike work."""
        return f"x{m.samples_per_second(row) / m.samples_per_second(base):.2f}"

    @staticmethod
    def reason(run: Run) -> str:
        failed = next((check for check in run.data["audit"] if not check["ok"]), None)
        if run.data["status"] == "ok" and failed:
            return f"{failed['name']}: asked {failed['asked']}, found {failed['found']}"
        return run.data["reason"]

    def wanted(self, recipe: str, spec: dict[str, Any]) -> tuple[Callable[[Row | Run], bool], str]:
        """A test, and the recipe as the results would have it."""
        usual = WRITTEN.get(recipe, recipe)
        spec = {"model": self.model} | spec

        def fits(it: Row | Run) -> bool:
            alike = it.recipe in (recipe, usual)
            return alike and all(it.spec.get(name) == value for name, value in spec.items())

        return fits, usual
