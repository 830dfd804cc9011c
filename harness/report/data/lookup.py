"""Finding single rows of a report by what they ran, for stories that compare named rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.report.rows import Report, Row
from harness.result import Status
from harness.spec import Spec
from strategies import parse

__all__ = ["Missing", "Rows", "beyond_state", "state_bytes", "state_share", "step_bytes"]

STATE = ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes", "ema_bytes")
STEP_PHASES = ("forward_peak_bytes", "backward_peak_bytes", "optimizer_peak_bytes")


class Missing(LookupError):
    """A row that a story needs was not measured; the message says which and why."""


class Rows:
    """Every measured row of a report, whatever group it is in."""

    def __init__(self, report: Report) -> None:
        self.rows = [row for group in report.groups for row in group.rows]
        self.unfinished = report.unfinished
        self.model = report.groups[0].reference.spec.model if report.groups else None

    def get(self, recipe: str, **fields: Any) -> Row:
        """The row of ``recipe`` whose spec has these fields; a function says which values fit.

        Of the reference row's model, unless another is named.

        Raises:
            Missing: it was not measured; with the reason where the results hold one.
        """
        recipe = parse(recipe).text
        fits = self._wanted(recipe, fields)
        found = next((row for row in self.rows if fits(row.spec)), None)
        if found is not None:
            return found
        gone = next((one for one in self.unfinished if fits(one.result.spec)), None)
        if gone is None:
            raise Missing(f"{recipe} is not among the results")
        raise Missing(f"{recipe} is {gone.status.value}: {gone.reason}")

    def status(self, recipe: str, **fields: Any) -> Status | None:
        """How the row that ``get`` would take ended; None if it is not among the results."""
        fits = self._wanted(parse(recipe).text, fields)
        if any(fits(row.spec) for row in self.rows):
            return Status.OK
        return next((one.status for one in self.unfinished if fits(one.result.spec)), None)

    def _wanted(self, recipe: str, fields: dict[str, Any]) -> Callable[[Spec], bool]:
        fields = {"model": lambda model: self.model in (None, model), **fields}

        def fits(spec: Spec) -> bool:
            return spec.recipe == recipe and all(
                _fits(getattr(spec, name), want) for name, want in fields.items()
            )

        return fits

    def step_bytes(self, recipe: str, **fields: Any) -> int:
        """Peak bytes of one training step: the allocator's on a GPU, the traced tensors without
        one (the resident mark of a process is too coarse for a few MiB)."""
        return step_bytes(self.get(recipe, **fields))

    def beyond_state(self, recipe: str, **fields: Any) -> int:
        """See ``beyond_state``."""
        return beyond_state(self.get(recipe, **fields))

    def saved(self, recipe: str, base: str, **fields: Any) -> float:
        """The share of ``base``'s peak that ``recipe`` saves; negative where it costs."""
        return 1 - self.step_bytes(recipe, **fields) / self.step_bytes(base, **fields)

    def speed(self, recipe: str, base: str, **fields: Any) -> float:
        """Samples a second as a multiple of ``base``'s."""
        ours, theirs = (self.get(r, **fields).numbers.samples_per_second for r in (recipe, base))
        return ours / theirs


def _fits(value: Any, wanted: Any) -> bool:
    return wanted(value) if callable(wanted) else value == wanted


def step_bytes(row: Row) -> int:
    """See ``Rows.step_bytes``.

    Raises:
        Missing: the row was not traced.
    """
    if row.first.meter == "cuda":
        found = [value for name in STEP_PHASES if (value := getattr(row.numbers, name))]
        if found:
            return max(found)
    parts = [
        getattr(row.numbers, name) for name in (*STATE, "activations_bytes", "workspace_bytes")
    ]
    if None in parts:
        raise Missing(f"{row.label} was not traced")
    return sum(parts)


def beyond_state(row: Row) -> int:
    """The most that a step held beyond parameters, gradients, optimizer state and average: kept
    activations, those computed again, and temporaries, in traced bytes. Not at the step's peak:
    in a deep model with few activations that is where the last gradients arrive.

    Raises:
        Missing: the row was not traced.
    """
    if row.numbers.beyond_state_bytes is None:
        raise Missing(f"{row.label} was not traced, or by an older version")
    return row.numbers.beyond_state_bytes


def state_bytes(row: Row) -> int:
    """Bytes of parameters, gradients, optimizer state and average at the peak of a step.

    Raises:
        Missing: the row was not traced.
    """
    parts = [getattr(row.numbers, name) for name in STATE]
    if None in parts:
        raise Missing(f"{row.label} was not traced")
    return sum(parts)


def state_share(row: Row) -> float:
    """The same as a share of that peak."""
    return state_bytes(row) / step_bytes(row)
