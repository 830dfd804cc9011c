"""What adding a part did, and why it showed or did not, from what the peak was made of."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.recount import measures as m
from tests.recount import versus as v
from tests.recount.cells import MIB, Cell, Number, change
from tests.recount.raw import Group, Row

__all__ = ["Effect", "effects"]

SHOWS, NAMED, MOST = 0.02, 0.03, 3
"""Shares of the peak before, from which on a change shows and a category is named; how many are."""


@dataclass(frozen=True)
class Effect:
    """``row`` is ``base`` with ``part`` added, or in place of ``gone``."""

    base: Row
    row: Row
    part: str
    gone: str = ""

    @property
    def words(self) -> str:
        return f"{self.part} (in place of {self.gone})" if self.gone else self.part

    @property
    def speed(self) -> float | str:
        return v.ratio_cell(self.row, self.base)

    @property
    def need(self) -> float | None:
        ours, theirs = m.need_bytes(self.row), m.need_bytes(self.base)
        return ours / theirs - 1 if ours and theirs else None


# ---- pairs ----


def effects(group: Group) -> list[Effect]:
    """Those that differ in how they shard first, then those that differ in one added part."""
    if group.world:
        return []
    rows = v.ranked(group)
    added = [
        Effect(base, row, *(row.parts - base.parts))
        for base in rows
        for row in rows
        if base.parts < row.parts and len(row.parts - base.parts) == 1
        if base.spec["processes"] == row.spec["processes"]
    ]
    return [*sharded(rows), *sorted(added, key=lambda pair: pair.part)]


def split(row: Row) -> tuple[str, list[str]]:
    first, *rest = row.recipe.split("+")
    return first, rest


def sharded(rows: list[Row]) -> list[Effect]:
    """Each row with the one whose sharding its own is a variant or a higher stage of, else with
    the reference's."""
    found = []
    usual = split(rows[0].group.reference)[0]
    for row in sorted(rows, key=lambda r: (len(split(r)[1]), split(r)[1], r.label)):
        kind, rest = split(row)
        alike = (r for r in rows if split(r)[1] == rest)
        others = {split(r)[0]: r for r in alike if r.spec["processes"] == row.spec["processes"]}
        name = next((n for n in lower(kind, usual) if n in others), None)
        if kind != usual and name:
            found.append(Effect(others[name], row, kind, name))
    return found


def lower(kind: str, usual: str) -> list[str]:
    """zero2_offload: zero2, zero1, the usual."""
    numbered = re.match(r"([^\d]+)(\d+)(?=_|$)", kind)
    stages = range(int(numbered[2]) - 1, 0, -1) if numbered else ()
    variant = [kind.rsplit("_", 1)[0]] if "_" in kind else []
    return [*variant, *(f"{numbered[1]}{stage}" for stage in stages), usual]


# ---- why ----


def held(row: Row) -> dict[str, int] | None:
    rank = m.fullest(row)
    return rank and {name: rank["categories"][name] for name in m.CATEGORIES}


def name_of(category: str) -> str:
    return "EMA" if category == "ema" else category.replace("_", " ")


def why(pair: Effect) -> Cell:
    """As pieces; nothing where one of the two was not traced."""
    before, after = held(pair.base), held(pair.row)
    if not before or not after:
        return None
    whole = sum(before.values())
    grown = sum(after.values()) / whole - 1
    moved = moves(before, after, whole)
    clauses: list[list] = []
    if abs(grown) >= SHOWS:
        clauses.append([("costs: ", "saves: ")[grown < 0], *(moved or ["a little of everything"])])
    else:
        largest = sorted(before, key=before.get, reverse=True)[:MOST]
        made = [[f"{name_of(n)} ", *share(before[n], whole)] for n in largest]
        clauses.append(["did not show: the peak is ", *joined(made, ", ")])
        clauses += [["what changed cancels: ", *moved]] if moved else []
        clauses += elsewhere(pair, whole)
    ends = [m.fullest(row)["categories"]["phase"] for row in (pair.base, pair.row)]
    if ends[0] != ends[1]:
        clauses.append([f"the peak moved from {ends[0]} to {ends[1]}"])
    if pair.need is not None and abs(pair.need - grown) >= SHOWS:
        clauses.append(["the step's tensors alone: ", change(grown), " %"])
    return tuple(joined(clauses, "; "))


def moves(before: dict[str, int], after: dict[str, int], whole: int) -> list:
    """Categories that changed by 3 % of the whole, the largest change first."""
    size = {n: abs(after[n] - before[n]) / whole for n in before}
    named = [n for n in sorted(size, key=size.get, reverse=True) if size[n] >= NAMED][:MOST]
    words = [
        [f"{name_of(n)} ", *share(before[n], whole), " -> ", *share(after[n], whole)] for n in named
    ]
    return joined(words, ", ")


def elsewhere(pair: Effect, whole: int) -> list[list]:
    beyond = [m.category("beyond_state")(row) for row in (pair.base, pair.row)]
    if None in beyond or abs(beyond[1] - beyond[0]) < NAMED * whole:
        return []
    ends = [Number(size / MIB) for size in beyond]
    head = "away from the peak activations and temporaries went "
    return [[head, ends[0], " -> ", ends[1], " MiB at most"]]


def share(size: int, whole: int) -> list:
    return [Number(100 * size / whole), " %"]


def joined(parts: list[list], between: str) -> list:
    """Pieces one after the other."""
    flat: list = []
    for part in parts:
        flat += [between, *part] if flat else part
    return flat
