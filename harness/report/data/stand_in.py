"""Whether a group's reference stands in for another row: the one that was asked for did not run to
its end, or is not there. Nothing may be compared with a stand-in unsaid."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from harness.report.data.rows import FREE, Group, Unfinished
from harness.spec import Spec

__all__ = ["same_recipe", "with_asked"]


def same_recipe(one: str, other: str) -> bool:
    """Whether two recipes have the same parts, in whatever order."""
    return sorted(one.split("+")) == sorted(other.split("+"))


def with_asked(
    groups: Sequence[Group], wanted: str, unfinished: Sequence[Unfinished]
) -> list[Group]:
    """``groups``, those with a stand-in saying for whom. A group of other work than the one that
    has the ``wanted`` row has a reference of its own, and asked for no other, unless the wanted row
    was tried on its work too."""
    there = [row.spec.recipe for group in groups for row in group.rows]
    measured = any(same_recipe(recipe, wanted) for recipe in there)
    tried = [u for u in unfinished if same_recipe(u.result.spec.recipe, wanted)]
    return [_with_asked(group, wanted, tried, measured) for group in groups]


def _with_asked(group: Group, wanted: str, tried: Sequence[Unfinished], measured: bool) -> Group:
    if not wanted or same_recipe(group.reference.spec.recipe, wanted):
        return group
    here = [u for u in tried if _work(u.result.spec) == _work(group.reference.spec)]
    if measured and not here:
        return group
    ended = next((u.status.value for u in here or tried), "")
    reference = dataclasses.replace(
        group.reference, notes=(*group.reference.notes, f"in place of {wanted}")
    )
    rows = [reference if row is group.reference else row for row in group.rows]
    stands = {"rows": rows, "reference": reference}
    return dataclasses.replace(group, **stands, asked=wanted, asked_ended=ended)


def _work(spec: Spec) -> Spec:
    """A spec without what rows of one ranking may differ in."""
    usual = {f.name: f.default for f in dataclasses.fields(Spec)}
    return dataclasses.replace(spec, **{n: "" if n == "recipe" else usual[n] for n in FREE})
