"""Why a part of a recipe changed the peak, or did not: what the peak was made of before and after.

From the traced tensors of one step, on the fullest rank. All shares are of the peak before, so that
what the categories changed by adds up to what the peak did.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.report.data.effects import Effect
from harness.report.data.rows import Row
from harness.report.figures import derive
from harness.report.figures.categories import CATEGORIES, in_sentence
from harness.report.figures.units import column, one

__all__ = ["MOVED", "SHOWN", "held_at_peak", "why"]

SHOWN = 0.02
"""Share of the peak from which on a change shows."""
MOVED = 0.03
"""Share of the peak before, from which on a category is named."""
MOST_NAMED = 3


def why(effect: Effect) -> str | None:
    """In words; None where one of the two rows was not traced."""
    before, after = held_at_peak(effect.base), held_at_peak(effect.row)
    if not before or not after:
        return None
    whole = sum(before.values())
    change = sum(after.values()) / whole - 1
    moved = _moved(before, after, whole)
    if abs(change) >= SHOWN:
        texts = [f"{'saves' if change < 0 else 'costs'}: {moved or 'a little of everything'}"]
    else:
        texts = [f"did not show: {_made_of(before, whole)}"]
        texts += [f"what changed cancels: {moved}"] if moved else []
        texts += _elsewhere(effect, whole)
    texts += _phases(effect)
    return "; ".join([*texts, *_of_the_step(effect, change)])


def held_at_peak(row: Row) -> dict[str, int]:
    """Category -> bytes at the traced peak of a step; empty where the row was not traced."""
    sizes = {name: getattr(row.numbers, f"{name}_bytes") for name in CATEGORIES}
    return {} if None in sizes.values() else sizes


def _moved(before: Mapping[str, int], after: Mapping[str, int], whole: int) -> str:
    """Each category that changed by ``MOVED`` of the whole or more, the largest change first."""
    changes = {name: abs(after[name] - before[name]) / whole for name in before}
    named = [name for name, size in changes.items() if size >= MOVED]
    named.sort(key=lambda name: -changes[name])
    return ", ".join(
        f"{in_sentence(name)} {_share(before[name], whole)} -> {_share(after[name], whole)}"
        for name in named[:MOST_NAMED]
    )


def _made_of(held: Mapping[str, int], whole: int) -> str:
    """What most of a peak is, the largest first."""
    largest = sorted(held, key=lambda name: -held[name])[:MOST_NAMED]
    parts = [f"{in_sentence(name)} {_share(held[name], whole)}" for name in largest]
    return f"the peak is {', '.join(parts)}"


def _share(size: float, whole: float) -> str:
    return f"{100 * size / whole:.0f} %"


def _elsewhere(effect: Effect, whole: int) -> list[str]:
    """What changed at another instant of the step than its peak."""
    sizes = [row.numbers.beyond_state_bytes for row in (effect.base, effect.row)]
    if None in sizes or abs(sizes[1] - sizes[0]) < MOVED * whole:
        return []
    ends = " -> ".join(column("mib", sizes))
    return [f"away from the peak activations and temporaries went {ends} MiB at most"]


def _phases(effect: Effect) -> list[str]:
    """Whether the peak moved to another phase of the step."""
    ends = [_phase(row) for row in (effect.base, effect.row)]
    return [f"the peak moved from {ends[0]} to {ends[1]}"] if ends[0] != ends[1] else []


def _phase(row: Row) -> str:
    fullest = derive.fullest_rank([rank for result in row.results for rank in result.ranks])
    return fullest.categories.phase if fullest else ""


def _of_the_step(effect: Effect, change: float) -> list[str]:
    """The change of the step's tensors, where what a device must have says another."""
    needs = [row.numbers.need_bytes for row in (effect.row, effect.base)]
    if not all(needs) or abs(needs[0] / needs[1] - 1 - change) < SHOWN:
        return []
    return [f"the step's tensors alone: {one('change', change)} %"]
