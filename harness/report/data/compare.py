"""Comparison of two result sets: the changes beyond noise; and reports of usable files only."""

from __future__ import annotations

import dataclasses
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from harness import result
from harness.prediction import Prediction
from harness.report.data import lookup
from harness.report.data.grouping import build
from harness.report.data.rows import Report, Row, SuiteHead, Unfinished, read_suite
from harness.report.figures import derive, floor, parity, units
from harness.resolve import run_name
from harness.result import Result
from harness.spec import Spec

Made = TypeVar("Made")
FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
MOST = 20
"""Files left out before the fault counts as the report's own."""
STEP_LIMIT = 0.05
"""Relative difference of medians for a change, if no row of either set was measured twice.

The intervals must not overlap either.
"""
PEAK_LIMIT = 0.02
PEAK_LIMIT_BYTES = 16 * units.MIB
"""A peak has changed if it exceeds either of the two limits."""


class Part(NamedTuple):
    """An input file of a report, with its content."""

    name: str
    content: Any
    key: str = ""


def of_usable(
    results: Sequence[Result],
    skipped: Sequence[str],
    suite: SuiteHead,
    predictions: Mapping[str, Prediction],
    render: Callable[[Report], Made],
) -> Made:
    """Return ``render`` of the report of all usable files.

    The typed reader (``harness.json_files.build``) has already checked the types. This function
    handles values of the right type from which nothing can be derived. ``Report.skipped`` has a
    line for each file left out.

    Raises:
        Exception: the error of ``render``, if no single file causes it.
    """
    left_out = list(skipped)
    parts = [Part("calibration.json", suite.calibration, "calibration")]
    parts += [Part(f"prediction.json of {key}", one, key) for key, one in predictions.items()]
    parts += [Part(f"runs/{run_name(result.spec)}", result) for result in results]

    def made(kept: Sequence[Part]) -> Made:
        found = [part.content for part in kept if isinstance(part.content, Result)]
        named = {part.key: part.content for part in kept if part.key and part.content}
        head = dataclasses.replace(suite, calibration=named.pop("calibration", None))
        return render(build(found, left_out, head, named))

    def works(kept: Sequence[Part]) -> bool:
        try:
            made(kept)
        except FAULTS:
            return False
        return True

    for _ in range(MOST):
        try:
            return made(parts)
        except FAULTS as error:
            culprit = _culprit(parts, works)
            if culprit is None:
                raise
            parts.remove(culprit)
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}, line {last.lineno}"
            left_out.append(f"{culprit.name}: {type(error).__name__}: {error} ({where})")
    return made(parts)


def _culprit(parts: Sequence[Part], works: Callable[[Sequence[Part]], bool]) -> Part | None:
    """Return the part without which the others work.

    Bisection finds a part that breaks a report alone. A part that breaks it only together with
    another is found one by one.
    """
    some = list(parts)
    while len(some) > 1:
        first, second = some[: len(some) // 2], some[len(some) // 2 :]
        if not works(first):
            some = first
        elif not works(second):
            some = second
        else:
            rests = ([other for other in parts if other is not part] for part in some)
            return next((p for p, rest in zip(some, rests, strict=True) if works(rest)), None)
    return some[0]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One spec that both sets have. Ratios are new over old; None if a side has no number.

    ``step_limit_fraction``: relative difference of medians that run-to-run variance explains.
    It is None if no row was measured twice; then the steps' intervals decide. ``loss_share``,
    ``grad_norm_share`` and ``weights_share`` (effect of the optimizer): distances as shares of
    the limit of rounding, above 1 moved.
    """

    label: str
    old_status: str
    new_status: str
    old_step_seconds: float | None = None
    new_step_seconds: float | None = None
    step_ratio: float | None = None
    step_limit_fraction: float | None = None
    intervals_overlap: bool | None = None
    old_need_bytes: int | None = None
    new_need_bytes: int | None = None
    loss_distance: float | None = None
    grad_norm_distance: float | None = None
    loss_share: float | None = None
    grad_norm_share: float | None = None
    weights_share: float | None = None

    @property
    def step_changed(self) -> bool:
        """True beyond the run-to-run variance; if unknown, beyond the steps' intervals and 5 %."""
        if self.step_ratio is None:
            return False
        if self.step_limit_fraction is None:
            return is_step_change(self.step_ratio, bool(self.intervals_overlap))
        return abs(math.log(self.step_ratio)) > math.log1p(self.step_limit_fraction)

    @property
    def need_change_fraction(self) -> float | None:
        """The change as a fraction of the old need."""
        if not self.old_need_bytes or self.new_need_bytes is None:
            return None
        return self.new_need_bytes / self.old_need_bytes - 1

    @property
    def words(self) -> str:
        """The changes in words, in capitals for the worse; empty without a change."""
        faster = (self.step_ratio or 1) < 1
        less = (self.new_need_bytes or 0) < (self.old_need_bytes or 0)
        changes = {
            f"{self.old_status} -> {self.new_status}": self.old_status != self.new_status,
            "faster" if faster else "SLOWER": self.step_changed,
            "less memory" if less else "MORE MEMORY": is_peak_change(
                self.old_need_bytes, self.new_need_bytes
            ),
            "LOSS MOVED": (self.loss_share or 0.0) > 1.0,
            "GRADIENTS MOVED": (self.grad_norm_share or 0.0) > 1.0,
            "WEIGHTS MOVED": (self.weights_share or 0.0) > 1.0,
        }
        return ", ".join(word for word, holds in changes.items() if holds)


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


def is_step_change(ratio: float, intervals_overlap: bool) -> bool:
    """Return True if a step ratio (new over old) is outside the noise and beyond 5 %."""
    return not intervals_overlap and abs(ratio - 1) > STEP_LIMIT


def is_peak_change(old: int | None, new: int | None) -> bool:
    """Return True if a peak (bytes) changed by more than 2 % of the old one, or 16 MiB."""
    if old is None or new is None:
        return False
    moved = abs(new - old)
    return moved > PEAK_LIMIT * old or moved > PEAK_LIMIT_BYTES


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
    both = [spec for spec in before if spec in after]
    known = [
        f"{side}: {lookup.rests_on(found)}"
        for side, report in (("old", old), ("new", new))
        if (found := next((g.floor for g in report.groups if g.floor), None))
    ]
    basis = "Steps are judged by their own spread: neither set measured a row twice."
    if known:
        basis = f"Steps are judged by run-to-run variance ({'; '.join(known)})."
    names = {spec: str(spec).removeprefix("--recipe ") for spec in (*before, *after)}
    return Comparison(
        environment=_environment(old, new),
        changes=[_change(spec, before[spec], after[spec]) for spec in both],
        only_old=[names[spec] for spec in before if spec not in after],
        only_new=[names[spec] for spec in after if spec not in before],
        skipped=[*old.skipped, *new.skipped],
        basis=basis,
        unlike=_unlike(before, after),
    )


def _unlike(before: Iterable[Spec], after: Iterable[Spec]) -> dict[str, list[str]]:
    """Return what differs between rows of one recipe that do not match, and their recipes.

    Each row is compared with the nearest one of the other set.
    """
    old, new = ([s for s in ours if s not in theirs] for ours, theirs in
                ((set(before), set(after)), (set(after), set(before))))  # fmt: skip
    found: dict[str, list[str]] = {}
    for spec in sorted(old, key=str):
        near = min((_differing(spec, s) for s in new if s.recipe == spec.recipe),
                   key=len, default=[])  # fmt: skip
        recipes = found.setdefault("; ".join(near), [])
        recipes += [] if spec.recipe in recipes else [spec.recipe]
    found.pop("", None)
    return found


def _differing(old: Spec, new: Spec) -> list[str]:
    pairs = zip(dataclasses.asdict(old).items(), dataclasses.asdict(new).values(), strict=True)
    return [f"{name} is {a!r:.60} and {b!r:.60}" for (name, a), b in pairs if a != b]


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
    facts: dict[str, Any] = {"label": spec.recipe, **_side("old", old), **_side("new", new)}
    if isinstance(old, Row) and isinstance(new, Row):
        both = old.numbers, new.numbers
        ends = [(n.step_seconds_p10, n.step_seconds_p90) for n in both]
        noise = floor.joined(old.floor, new.floor)
        limit = math.exp(floor.margin(noise, old.runs, new.runs)) - 1 if noise else None
        facts |= {
            "step_ratio": both[1].step_seconds_median / both[0].step_seconds_median,
            "step_limit_fraction": limit,
            "intervals_overlap": derive.overlap(*ends),
            **_computation(old.first, new.first),
        }
    return Change(**facts)


def _computation(old: Result, new: Result) -> dict[str, float | None]:
    """Return the distances of two runs of one recipe, and their shares of the old run's limits."""
    far = parity.distances(new, old)
    shares = parity.shares(new, old, parity.limits([old]))
    did = [shares[measure] for measure in parity.OF_BLOCKS if measure in shares]
    return {
        "loss_distance": far.get("loss"),
        "grad_norm_distance": far.get("norm"),
        "loss_share": shares.get("loss"),
        "grad_norm_share": shares.get("norm"),
        "weights_share": max(did, default=None),
    }


def _side(side: str, entry: Row | Unfinished) -> dict[str, Any]:
    """Return one side of a change: its status, and its numbers if it has any."""
    if isinstance(entry, Unfinished):
        return {f"{side}_status": entry.status.value}
    return {
        f"{side}_status": "ok",
        f"{side}_step_seconds": entry.numbers.step_seconds_median,
        f"{side}_need_bytes": entry.numbers.need_bytes,
    }
