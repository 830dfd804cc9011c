"""Two result sets against each other: what changed by more than the noise explains."""

from __future__ import annotations

import dataclasses
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from harness import result
from harness.planner.prediction import Prediction
from harness.report.data import environment as environment_facts
from harness.report.data import lookup
from harness.report.data.grouping import build
from harness.report.data.rows import Report, Row, SuiteHead, Unfinished, read_suite
from harness.report.figures import derive, floor, parity, units
from harness.report.figures.numbers import Numbers
from harness.resolve import run_name
from harness.result import Result
from harness.spec import Spec

# ---- usable ----
# A report of the files that can be used: one whose content breaks it is named and left out.


Made = TypeVar("Made")
FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
MOST = 20
"""Files that are left out before the fault counts as the report's own."""


class Part(NamedTuple):
    """A file that a report is made of, as it was read."""

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
    """Return what ``render`` makes of the report of all that can be used.

    Files pass the typed reader first (``harness.json_files.build``); this is for values of the
    right type that nothing can be derived from. Each that is left out has a line in
    ``Report.skipped``.

    Raises:
        Exception: what ``render`` raised, where no single file explains it.
    """
    parts, left_out = _parts(results, suite, predictions), list(skipped)

    def made(kept: Sequence[Part]) -> Made:
        found = [part.content for part in kept if isinstance(part.content, Result)]
        named = {part.key: part.content for part in kept if part.key and part.content}
        beside = {name: named.pop(name, None) for name in ("calibration", "forecast")}
        head = dataclasses.replace(suite, **beside)
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
            left_out.append(f"{culprit.name}: {_words(error)}")
    return made(parts)


def _parts(
    results: Sequence[Result], suite: SuiteHead, predictions: Mapping[str, Prediction]
) -> list[Part]:
    beside = [
        Part(f"{name}.json", getattr(suite, name), name) for name in ("calibration", "forecast")
    ]
    foretold = [Part(f"prediction.json of {key}", one, key) for key, one in predictions.items()]
    return [*beside, *foretold, *(Part(f"runs/{run_name(r.spec)}", r) for r in results)]


def _culprit(parts: Sequence[Part], works: Callable[[Sequence[Part]], bool]) -> Part | None:
    """Return the part without which the others work: found by halves if it breaks a report alone,
    and one after the other if it breaks one beside another part."""
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


def _words(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}, line {last.lineno}"
    return f"{type(error).__name__}: {error} ({where})"


STEP_LIMIT = 0.05
"""Share by which medians must differ, beside intervals that do not overlap, where no row of
either set was measured twice."""
PEAK_LIMIT = 0.02
PEAK_LIMIT_BYTES = 16 * units.MIB
"""A peak has changed beyond either of the two."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One spec that is in both sets. Ratios are new over old; None where a side has no number.

    ``step_limit_fraction``: the share up to which run-to-run variance explains another median;
    None where no row was measured twice, and the steps' own intervals decide. ``loss_share``,
    ``grad_norm_share`` and ``weights_share`` (of what the optimizer did): distances as shares of
    what rounding explains, above 1 moved.
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
    def status_changed(self) -> bool:
        return self.old_status != self.new_status

    @property
    def step_changed(self) -> bool:
        """Beyond the run-to-run variance; where none is known, beyond the steps' interval and
        beyond 5 %."""
        if self.step_ratio is None:
            return False
        if self.step_limit_fraction is None:
            return is_step_change(self.step_ratio, bool(self.intervals_overlap))
        return abs(math.log(self.step_ratio)) > math.log1p(self.step_limit_fraction)

    @property
    def peak_changed(self) -> bool:
        """Beyond 2 % or beyond 16 MiB."""
        return is_peak_change(self.old_need_bytes, self.new_need_bytes)

    @property
    def loss_changed(self) -> bool:
        """Beyond what rounding explains in the same computation."""
        return (self.loss_share or 0.0) > 1.0

    @property
    def grad_norm_changed(self) -> bool:
        """The same of the gradient norms."""
        return (self.grad_norm_share or 0.0) > 1.0

    @property
    def need_change_fraction(self) -> float | None:
        """Of what the old one needed."""
        if not self.old_need_bytes or self.new_need_bytes is None:
            return None
        return self.new_need_bytes / self.old_need_bytes - 1

    @property
    def words(self) -> str:
        """What changed, in words; those of a change for the worse are in capitals. Empty where
        nothing did."""
        faster = (self.step_ratio or 1) < 1
        less = (self.new_need_bytes or 0) < (self.old_need_bytes or 0)
        changes = {
            f"{self.old_status} -> {self.new_status}": self.status_changed,
            "faster" if faster else "SLOWER": self.step_changed,
            "less memory" if less else "MORE MEMORY": self.peak_changed,
            "LOSS MOVED": self.loss_changed,
            "GRADIENTS MOVED": self.grad_norm_changed,
            "WEIGHTS MOVED": (self.weights_share or 0.0) > 1.0,
        }
        return ", ".join(word for word, holds in changes.items() if holds)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two sets: what differs around the runs, then row by row. ``basis``: by what it is decided
    whether a step time changed, in a sentence."""

    environment: list[tuple[str, str, str]]
    changes: list[Change]
    only_old: list[str]
    only_new: list[str]
    skipped: list[str] = field(default_factory=list)
    basis: str = ""

    @property
    def changed(self) -> list[Change]:
        """The rows in which something changed beyond noise."""
        return [change for change in self.changes if change.words]


def is_step_change(ratio: float, intervals_overlap: bool) -> bool:
    """Whether a step ratio (new over old) is a change: outside the noise and beyond 5 %."""
    return not intervals_overlap and abs(ratio - 1) > STEP_LIMIT


def is_peak_change(old: int | None, new: int | None) -> bool:
    """Whether a peak (bytes) changed: by more than 2 % of the old one, or more than 16 MiB."""
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
    """Compare two sets whose rows are derived already."""
    before, after = _entries(old), _entries(new)
    both = [spec for spec in before if spec in after]
    return Comparison(
        environment=environment_differences(old, new),
        changes=[_change(spec, before[spec], after[spec]) for spec in both],
        only_old=[_name(spec) for spec in before if spec not in after],
        only_new=[_name(spec) for spec in after if spec not in before],
        skipped=[*old.skipped, *new.skipped],
        basis=basis(old, new),
    )


def basis(old: Report, new: Report) -> str:
    """By what it is decided whether a step time changed."""
    known = [
        f"{side}: {lookup.rests_on(found)}"
        for side, report in (("old", old), ("new", new))
        if (found := next((g.floor for g in report.groups if g.floor), None))
    ]
    if known:
        return f"Steps are judged by run-to-run variance ({'; '.join(known)})."
    return "Steps are judged by their own spread: neither set measured a row twice."


def _entries(report: Report) -> dict[Spec, Row | Unfinished]:
    """The row of each spec; one that was measured goes before a repetition that was not."""
    unfinished = {dataclasses.replace(u.result.spec, repeat=0): u for u in report.unfinished}
    rows = {
        dataclasses.replace(row.spec, repeat=0): row
        for group in report.groups
        for row in group.rows
    }
    return {**rows, **{spec: u for spec, u in unfinished.items() if spec not in rows}}


def _name(spec: Spec) -> str:
    return str(spec).removeprefix("--recipe ")


def _change(spec: Spec, old: Row | Unfinished, new: Row | Unfinished) -> Change:
    facts: dict[str, Any] = {"label": spec.recipe, **_side("old", old), **_side("new", new)}
    if isinstance(old, Row) and isinstance(new, Row):
        a, b = old.numbers, new.numbers
        ends = [(n.step_seconds_p10, n.step_seconds_p90) for n in (a, b)]
        facts |= {
            "step_ratio": b.step_seconds_median / a.step_seconds_median,
            "step_limit_fraction": step_limit(old, new),
            "intervals_overlap": derive.overlap(*ends),
            **_computation(old.first, new.first),
        }
        if _counted_otherwise(a, b):
            facts |= {"old_need_bytes": None, "new_need_bytes": None}
    return Change(**facts)


def step_limit(old: Row, new: Row) -> float | None:
    """The share by which the medians of one row may differ between two sets with nothing changed,
    by the run-to-run variance within the sets."""
    noise = floor.joined(old.floor, new.floor)
    return None if noise is None else math.exp(floor.margin(noise, old.runs, new.runs)) - 1


def _computation(old: Result, new: Result) -> dict[str, float | None]:
    """How far two runs of one recipe are apart, held to what the old one computed in."""
    far = parity.distances(new, old)
    shares = parity.shares(new, old, parity.limits([old]))
    did = [shares[measure] for measure in parity.OF_PARAMETERS if measure in shares]
    return {
        "loss_distance": far.get("loss"),
        "grad_norm_distance": far.get("norm"),
        "loss_share": shares.get("loss"),
        "grad_norm_share": shares.get("norm"),
        "weights_share": max(did, default=None),
    }


def _counted_otherwise(old: Numbers, new: Numbers) -> bool:
    """Whether the memory of one has what is kept in host memory in it, and the other has not."""
    places = [n.placed_by == derive.UNTOLD for n in (old, new)]
    return places[0] is not places[1] and any(n.hosted_bytes for n in (old, new))


def _side(side: str, entry: Row | Unfinished) -> dict[str, Any]:
    """The fields of one side of a change: its status, and its numbers where it has some."""
    if isinstance(entry, Unfinished):
        return {f"{side}_status": entry.status.value}
    return {
        f"{side}_status": "ok",
        f"{side}_step_seconds": entry.numbers.step_seconds_median,
        f"{side}_need_bytes": entry.numbers.need_bytes,
    }


def environment_differences(old: Report, new: Report) -> list[tuple[str, str, str]]:
    """(fact, old, new) for each fact of the environment that differs; all values a set has."""
    before, after = (_facts(report) for report in (old, new))
    names = [n for n in dict.fromkeys([*before, *after]) if n not in environment_facts.IGNORED]
    sides = [(n, before.get(n, [units.NONE]), after.get(n, [units.NONE])) for n in names]
    listed = environment_facts.listed
    return [(name, listed(a), listed(b)) for name, a, b in sides if a != b]


def _facts(report: Report) -> dict[str, list[str]]:
    rows = [row for group in report.groups for row in group.rows]
    return {n: sorted(values) for n, values in environment_facts.merged(rows).items()}
