"""Comparison of two result sets: the changes beyond noise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import result
from harness.report.data import lookup
from harness.report.data.grouping import of_usable
from harness.report.data.rows import Report, Row, Unfinished, read_suite
from harness.report.figures import derive, parity, units
from harness.report.figures.floor import margin
from harness.spec import Spec

STEP_LIMIT = 0.05
"""Relative difference of medians for a change, if no row of either set was measured twice.

The intervals must not overlap either.
"""
PEAK_LIMIT, PEAK_LIMIT_BYTES = 0.02, 16 * units.MIB
"""A need has changed if its change exceeds either of the two limits."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One spec that both sets have. Ratios are new over old; None if a side has no number.

    ``step_limit_fraction``: relative difference of medians that run-to-run variance explains.
    It is None if no row was measured twice; then the steps' intervals decide. ``words``: the
    changes, in capitals for the worse; empty without a change.
    """

    label: str
    new_status: str
    words: str
    old_step_seconds: float | None = None
    new_step_seconds: float | None = None
    step_ratio: float | None = None
    step_limit_fraction: float | None = None
    intervals_overlap: bool | None = None
    old_need_bytes: int | None = None
    new_need_bytes: int | None = None
    need_change_fraction: float | None = None
    loss_distance: float | None = None
    grad_norm_distance: float | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two sets: differences of the environment, then of each row.

    ``basis``: a sentence on the criterion for a changed step time. ``unlike``: differing settings
    -> recipes that both sets have with them, and that are therefore not compared.
    """

    environment: list[tuple[str, str, str]]
    changes: list[Change]
    only_old: list[str]
    only_new: list[str]
    skipped: list[str] = field(default_factory=list)
    basis: str = ""
    unlike: dict[str, list[str]] = field(default_factory=dict)

    @property
    def changed(self) -> list[Change]:
        """The rows that changed beyond noise."""
        return [change for change in self.changes if change.words]


def compare(old: Path, new: Path) -> Comparison:
    """Compare the result sets of two folders."""
    sides = []
    for folder in (old, new):
        results, skipped = result.load_all(Path(folder))
        suite = read_suite(Path(folder))
        skipped += suite.skipped
        sides.append(of_usable(results, skipped, suite, {}, lambda report: report))
    return compare_reports(*sides)


def compare_reports(old: Report, new: Report) -> Comparison:
    """Compare two sets whose rows are already derived."""
    before, after = _entries(old), _entries(new)
    only_old = [spec for spec in before if spec not in after]
    only_new = [spec for spec in after if spec not in before]
    known = [
        f"{side}: {lookup.rests_on(found)}"
        for side, report in (("old", old), ("new", new))
        if (found := next((g.floor for g in report.groups if g.floor), None))
    ]
    basis = "Steps are judged by their own spread: neither set measured a row twice."
    if known:
        basis = f"Steps are judged by run-to-run variance ({'; '.join(known)})."
    return Comparison(
        environment=_environment(old, new),
        changes=[_change(spec, before[spec], after[spec]) for spec in before if spec in after],
        only_old=[str(spec).removeprefix("--recipe ") for spec in only_old],
        only_new=[str(spec).removeprefix("--recipe ") for spec in only_new],
        skipped=[*old.skipped, *new.skipped],
        basis=basis,
        unlike=_unlike(only_old, only_new),
    )


def _unlike(old: Sequence[Spec], new: Sequence[Spec]) -> dict[str, list[str]]:
    """Return what differs between rows of one recipe that do not match, and their recipes.

    Each row is compared with the nearest one of the other set.
    """
    found: dict[str, list[str]] = {}
    for spec in sorted(old, key=str):
        ours = dataclasses.asdict(spec)
        apart = [
            [f"{k} is {ours[k]!r:.60} and {v!r:.60}" for k, v in theirs.items() if v != ours[k]]
            for theirs in (dataclasses.asdict(s) for s in new if s.recipe == spec.recipe)
        ]
        near: list[str] = min(apart, key=len, default=[])
        recipes = found.setdefault("; ".join(near), [])
        recipes += [] if spec.recipe in recipes else [spec.recipe]
    found.pop("", None)
    return found


def _environment(old: Report, new: Report) -> list[tuple[str, str, str]]:
    """Return (fact, old, new) for each environment fact that differs, with all its values."""
    before, after = (
        lookup.environment(row for group in report.groups for row in group.rows)
        for report in (old, new)
    )
    found = []
    for name in dict.fromkeys([*before, *after]):
        a, b = (sorted(facts.get(name, [units.NONE])) for facts in (before, after))
        if a != b and name not in lookup.IGNORED:
            found.append((name, lookup.listed(a), lookup.listed(b)))
    return found


def _entries(report: Report) -> dict[Spec, Row | Unfinished]:
    """Return the row of each spec; a measured one precedes an unfinished repetition."""
    unfinished = {dataclasses.replace(u.result.spec, repeat=0): u for u in report.unfinished}
    rows = {
        dataclasses.replace(row.spec, repeat=0): row
        for group in report.groups
        for row in group.rows
    }
    return {**rows, **{spec: u for spec, u in unfinished.items() if spec not in rows}}


def _change(spec: Spec, old: Row | Unfinished, new: Row | Unfinished) -> Change:
    ends = ["ok" if isinstance(e, Row) else e.status.value for e in (old, new)]
    holds = {" -> ".join(ends): ends[0] != ends[1]}
    facts: dict[str, Any] = {}
    for side, entry in (("old", old), ("new", new)):
        if isinstance(entry, Row):
            facts[f"{side}_step_seconds"] = entry.numbers.step_seconds_median
            facts[f"{side}_need_bytes"] = entry.numbers.need_bytes
    if isinstance(old, Row) and isinstance(new, Row):
        ratio = facts["new_step_seconds"] / facts["old_step_seconds"]
        spans = [(r.numbers.step_seconds_p10, r.numbers.step_seconds_p90) for r in (old, new)]
        overlap, noises = derive.overlap(*spans), [r.floor for r in (old, new) if r.floor]
        limit = max((margin(noise, old.runs, new.runs) for noise in noises), default=None)
        moved = not overlap and abs(ratio - 1) > STEP_LIMIT
        if limit is not None:
            moved = abs(math.log(ratio)) > limit
        holds["faster" if ratio < 1 else "SLOWER"] = moved
        before, after = (row.numbers.need_bytes for row in (old, new))
        if before and after is not None:
            facts["need_change_fraction"] = after / before - 1
            least = min(PEAK_LIMIT * before, PEAK_LIMIT_BYTES)
            holds["less memory" if after < before else "MORE MEMORY"] = abs(after - before) > least
        far = parity.distances(new.first, old.first)
        shares = parity.shares(new.first, old.first, parity.limits([old.first]))
        holds |= {
            "LOSS MOVED": shares.get("loss", 0.0) > 1.0,
            "GRADIENTS MOVED": shares.get("norm", 0.0) > 1.0,
            "WEIGHTS MOVED": any(shares.get(measure, 0.0) > 1.0 for measure in parity.OF_BLOCKS),
        }
        facts |= {
            "step_ratio": ratio,
            "step_limit_fraction": None if limit is None else math.exp(limit) - 1,
            "intervals_overlap": overlap,
            "loss_distance": far.get("loss"),
            "grad_norm_distance": far.get("norm"),
        }
    words = ", ".join(word for word, it_does in holds.items() if it_does)
    return Change(label=spec.recipe, new_status=ends[1], words=words, **facts)
