"""A row with other parts in its recipe or other fields of its spec, where it can be. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from harness.resolve import Resolved, resolve
from strategies import parse
from strategies.base import BadInput, Slot

__all__ = ["Edit", "changed", "edited"]

Edit = Mapping[Slot, str]
"""Places of a recipe -> the part that is to fill them; "" leaves a place to its default."""


def edited(row: Resolved, edit: Edit) -> str:
    """The recipe of ``row`` with other parts.

    Raises:
        BadInput: such a recipe cannot be.
    """
    parts = {part.slot: str(part) for part in row.recipe.strategies}
    # Where the spec keeps no average, the place for one is empty, and is not named.
    no_average = {} if row.spec.ema > 0 else {Slot.AVERAGE: ""}
    text = "+".join(filter(None, (parts | no_average | edit).values()))
    return parse(text, ema=row.spec.ema > 0).text


def changed(row: Resolved, edit: Edit, processes: int, /, **fields: Any) -> Resolved | None:
    """``row`` with other parts, and with other ``fields`` of its spec, on so many processes (one
    where its launch file says so); None where such a row cannot be, or would refuse."""
    try:
        text = edited(row, edit)
        ranks = 1 if parse(text).alone(row.spec.device) else processes
        given = {"recipe": text, "processes": ranks, **fields}
        found = resolve(dataclasses.replace(row.spec, **given))
    except BadInput:
        return None
    return None if found.refusal else found
