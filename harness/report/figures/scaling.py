"""Throughput against the number of processes: which rows belong together, and what is left of a
perfect growth. Pure functions, alike for measured rows and for predicted ones.

Weak scaling keeps the samples of a process, strong scaling those of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strategies import parse
from strategies.base import Slot

__all__ = ["REGIMES", "Line", "Point", "base_of", "efficiency", "lines", "plain", "ring_bytes",
           "told_once"]  # fmt: skip

REGIMES = ("weak", "strong")
TOGETHER = (Slot.SEQUENCE, Slot.TENSOR)
"""Places of parts that want several ranks."""
RINGS = {
    "allreduce": lambda size, ranks: 2 * size * (ranks - 1) // ranks,
    "reduce_scatter": lambda size, ranks: size * (ranks - 1) // ranks,
    "reduce_scatter_base": lambda size, ranks: size * (ranks - 1) // ranks,
    "alltoall_base": lambda size, ranks: size * (ranks - 1) // ranks,
    "allgather": lambda size, ranks: size * (ranks - 1),
    "allgather_base": lambda size, ranks: size * (ranks - 1),
}
"""Collective -> bytes that a rank sends, of those that it hands over, if it is a ring."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One row: ``recipe`` as it was asked for, on ``count`` processes, of ``batch`` samples a step
    over all of them. ``seconds`` of one step: as told, and at each end of what is not known of it
    (empty where only the number is told); ``row`` is what the point was made of."""

    recipe: str
    count: int
    batch: int
    seconds: float | None
    ends: tuple[float, ...] = ()
    row: Any = None

    @property
    def rate(self) -> float | None:
        """Samples a second of all processes."""
        return self.batch / self.seconds if self.seconds else None


@dataclass(frozen=True, kw_only=True)
class Line:
    """The points of one recipe in one regime, by their number of processes; ``base`` is what they
    are held to (``base_of``), None where there is nothing."""

    recipe: str
    points: tuple[Point, ...]
    base: Point | None


def plain(recipe: str) -> str:
    """The same training on one process: without sharding, and without what wants several ranks."""
    parts = parse(recipe)
    gone = {part.name for slot in TOGETHER if (part := parts.in_slot(slot))}
    words = [word for word in recipe.split("+") if word.partition(":")[0] not in gone]
    return "+".join("single" if w.partition(":")[0] == parts.sharding.name else w for w in words)


def lines(points: Iterable[Point], regime: str) -> list[Line]:
    """The lines of a regime, in the order of the points; plain training on one process begins each
    of its recipe's, and one that is of nothing else is no line."""
    every = list(points)
    alone = {(p.recipe, p.batch): p for p in every if p.count == 1 and p.recipe == plain(p.recipe)}
    found: dict[tuple[str, int], list[Point]] = {}
    for point in every:
        if point not in alone.values():
            found.setdefault((point.recipe, _kept(point, regime)), []).append(point)
    made = (_line(of, alone.get((plain(name), kept))) for (name, kept), of in found.items())
    return [line for line in made if line]


def _kept(point: Point, regime: str) -> int:
    """Samples that a regime keeps; where they are no whole number, of no other point's."""
    if regime == "strong":
        return point.batch
    return point.batch // point.count if point.batch % point.count == 0 else -point.count


def _line(points: Sequence[Point], alone: Point | None) -> Line | None:
    ordered = sorted(points, key=lambda p: p.count)
    counts = {p.count for p in ordered} | ({1} if alone else set())
    if len(counts) < 2:
        return None
    return Line(recipe=ordered[0].recipe, points=tuple(ordered), base=base_of(ordered, alone))


def base_of(points: Sequence[Point], alone: Point | None) -> Point | None:
    """What efficiency is held to: plain training on one process, which does nothing for the sake of
    others; where that has no time, the recipe's own fewest processes that have."""
    known = [p for p in (alone, *points) if p and p.seconds]
    return known[0] if known else None


def efficiency(
    point: Point, base: Point, shared: bool = False
) -> tuple[float, float, float] | None:
    """Samples a second of a process against ``base``'s: (least, as told, most), by the ends that
    both have. ``shared``: of all processes, where they share the same cores whatever their number.
    """
    if not (point.seconds and base.seconds):
        return None
    work = point.batch / base.batch * (1 if shared else base.count / point.count)
    ends = zip(base.ends, point.ends, strict=True) if base.ends and point.ends else ()
    found = [work * base.seconds / point.seconds, *(work * b / p for b, p in ends)]
    return min(found), found[0], max(found)


def told_once(found: Iterable[Line]) -> list[tuple[Line, Point]]:
    """The points of all lines, each behind its line; what several are held to once, before the
    first of them."""
    pairs: list[tuple[Line, Point]] = []
    told: list[Point] = []
    for line in found:
        if line.base and line.base not in (*line.points, *told):
            told.append(line.base)
            pairs.append((line, line.base))
        pairs += [(line, point) for point in line.points]
    return pairs


def ring_bytes(sent: Mapping[str, Mapping[str, int]], ranks: int) -> int | None:
    """Bytes that a rank sends in a step, of what it handed to collectives among all ``ranks``: the
    fact ``sent_bytes`` of a sharding, phase -> "collective type" -> bytes. None where a collective
    is in it whose share is not known."""
    total = 0
    for of_phase in sent.values():
        for name, size in of_phase.items():
            rule = RINGS.get(name.partition(" ")[0])
            if rule is None:
                return None
            total += rule(size, ranks)
    return total
