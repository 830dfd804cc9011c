"""Single rows by what they ran, for stories."""

from __future__ import annotations

from typing import Any

from tests.recount import measures as m
from tests.recount.raw import ResultSet, Row

__all__ = ["Rows", "step_bytes"]


def step_bytes(row: Row) -> int:
    """The peak of one step: the allocator's on a GPU, the traced tensors' without one."""
    if row.group.gpu:
        peaks = [m.phase_peak(phase)(row) for phase in ("forward", "backward", "optimizer")]
        return max(peak for peak in peaks if peak)
    return m.traced_total(m.fullest(row))


class Rows:
    """Every row of a set; of the reference's model, unless another is asked for."""

    def __init__(self, results: ResultSet) -> None:
        self.results = results
        groups = [g for g in results.groups if g.reference.recipe == g.wanted]
        self.model = max(groups, key=lambda g: len(g.rows)).reference.spec["model"]

    def get(self, recipe: str, **spec: Any) -> Row:
        """The row of ``recipe`` whose spec has these values."""
        spec = {"recipe": recipe, "model": self.model} | spec
        alike = [row for row in self.results.rows if all(row.spec[k] == v for k, v in spec.items())]
        if not alike:
            raise LookupError(f"no row of {spec}")
        return alike[0]

    def step(self, recipe: str, **spec: Any) -> int:
        return step_bytes(self.get(recipe, **spec))

    def change(self, recipe: str, base: str, **spec: Any) -> float:
        """Of ``base``'s peak of a step; negative where ``recipe`` saves."""
        return self.step(recipe, **spec) / self.step(base, **spec) - 1

    def speed(self, recipe: str, base: str, **spec: Any) -> float:
        ours, theirs = (m.samples_per_second(self.get(r, **spec)) for r in (recipe, base))
        return ours / theirs

    def beyond_state(self, recipe: str, **spec: Any) -> int:
        return m.category("beyond_state")(self.get(recipe, **spec))

    def filled(self, recipe: str, **spec: Any) -> float:
        """Activations and workspace as a share of the peak of a step."""
        row = self.get(recipe, **spec)
        parts = [m.category(name)(row) for name in ("activations", "workspace")]
        return sum(parts) / step_bytes(row)
