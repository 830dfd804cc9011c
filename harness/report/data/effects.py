"""Effects of each part of a recipe: pairs of rows that differ in one part alone."""

from __future__ import annotations

from typing import NamedTuple

from harness.report.data.rows import Group, Row


class Effect(NamedTuple):
    """The effect of adding ``part`` to the recipe of the row ``base``.

    ``replaced`` is the sharding that it replaces, if any.
    """

    part: str
    replaced: str
    base: Row
    row: Row


def effects(group: Group) -> list[Effect]:
    """Return all pairs of rows on equally many processes that differ in one part.

    First those whose sharding replaces the reference's, then those with one more part.
    """
    known = {(frozenset(words(row)), row.spec.processes): row for row in group.rows}
    usual = words(group.reference)[0]
    shardings, parts = [], []
    for row in group.rows:
        sharding, *more = words(row)
        base = known.get((frozenset((usual, *more)), row.spec.processes))
        if base and sharding != usual:
            shardings.append(Effect(sharding, usual, base, row))
        for part in more:
            rest = frozenset(words(row)) - {part}
            if base := known.get((rest, row.spec.processes)):
                parts.append(Effect(part, "", base, row))
    shardings.sort(key=lambda effect: (len(words(effect.row)), effect.row.label))
    return [*shardings, *sorted(parts, key=lambda effect: (effect.part, effect.base.versus.place))]


def words(row: Row) -> list[str]:
    """Return the parts of a row's recipe, its sharding first."""
    return row.spec.recipe.split("+")
