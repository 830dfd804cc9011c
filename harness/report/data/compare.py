"""Two result sets against each other: what changed by more than the noise explains."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import result
from harness.report import derive, surroundings, units
from harness.report.columns import Column
from harness.report.grouping import build
from harness.report.markdown import grid_lines
from harness.report.rows import Report, Row, Unfinished, read_suite
from harness.report.table import Grid, grid
from harness.spec import Spec

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Change", "Comparison", "compare", "compare_reports"]

STEP_LIMIT = 0.05
PEAK_LIMIT = 0.02
PEAK_LIMIT_BYTES = 16 * units.MIB
NOTE = (
    "Changed: the p10 to p90 intervals of the step times do not overlap and the medians differ by "
    "more than 5 %; the peak moved by more than 2 % or 16 MiB; or the loss moved by "
    "more than 1e-3 relative."
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One spec in both sets. Ratios are new over old; None where a side has no number."""

    label: str
    old_status: str
    new_status: str
    old_step_seconds: float | None = None
    new_step_seconds: float | None = None
    step_ratio: float | None = None
    intervals_overlap: bool | None = None
    old_peak_bytes: int | None = None
    new_peak_bytes: int | None = None
    loss_distance: float | None = None

    @property
    def status_changed(self) -> bool:
        return self.old_status != self.new_status

    @property
    def step_changed(self) -> bool:
        """Beyond the noise band and beyond 5 %."""
        return self.step_ratio is not None and is_step_change(
            self.step_ratio, bool(self.intervals_overlap)
        )

    @property
    def peak_changed(self) -> bool:
        """Beyond 2 % or beyond 16 MiB."""
        return is_peak_change(self.old_peak_bytes, self.new_peak_bytes)

    @property
    def loss_changed(self) -> bool:
        """Beyond the tolerance for the same computation."""
        return (self.loss_distance or 0.0) > derive.PARITY_LIMIT

    @property
    def words(self) -> str:
        """What changed, in words; empty where nothing did."""
        faster = (self.step_ratio or 1) < 1
        less = (self.new_peak_bytes or 0) < (self.old_peak_bytes or 0)
        found = {
            f"{self.old_status} -> {self.new_status}": self.status_changed,
            "faster" if faster else "SLOWER": self.step_changed,
            "less memory" if less else "MORE MEMORY": self.peak_changed,
            "LOSS MOVED": self.loss_changed,
        }
        return ", ".join(word for word, holds in found.items() if holds)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two sets: what differs around the runs, then row by row."""

    environment: list[tuple[str, str, str]]
    changes: list[Change]
    only_old: list[str]
    only_new: list[str]
    skipped: list[str] = field(default_factory=list)

    @property
    def changed(self) -> list[Change]:
        """The rows in which something changed beyond noise."""
        return [change for change in self.changes if change.words]

    def markdown(self) -> str:
        """The comparison as Markdown text."""
        lines = ["# Headroom: old against new", "", self.summary(), ""]
        if self.environment:
            lines += [*grid_lines(self._environment_grid()), ""]
        if self.changes:
            lines += [*grid_lines(self.grid()), "", NOTE, ""]
        return "\n".join(lines + [f"- {line}" for line in self._rest()]).rstrip() + "\n"

    def print(self, console: Console) -> None:
        """The comparison in a terminal."""
        from rich.markup import escape

        from harness.report import terminal

        console.print(self.summary())
        if self.environment:
            terminal.draw(self._environment_grid(), console)
        if self.changes:
            terminal.draw(self.grid(), console)
            console.print(NOTE, style="dim")
        for line in self._rest():
            console.print(escape(line))

    def summary(self) -> str:
        """One sentence."""
        rows = f"{len(self.changes)} rows in both sets, {len(self.changed)} changed beyond noise."
        if self.environment:
            return f"{rows} Not the same environment: read the differences first."
        return f"{rows} Same environment."

    def grid(self) -> Grid:
        """The rows, as cells."""
        table = grid("compare", "Rows", COLUMNS, self.changes)
        loud = [("alarm",) if c.words.upper() != c.words.lower() else () for c in self.changes]
        return dataclasses.replace(table, marks=loud)

    def _environment_grid(self) -> Grid:
        return Grid(
            key="environment",
            title="Environment",
            heads=["Differs", "Old", "New"],
            kinds=["text"] * 3,
            lines=[list(line) for line in self.environment],
            marks=[()] * len(self.environment),
        )

    def _rest(self) -> list[str]:
        sides = (("old", self.only_old), ("new", self.only_new))
        lines = [f"only in the {side} set: {label}" for side, labels in sides for label in labels]
        return lines + [f"skipped: {line}" for line in self.skipped]


def is_step_change(ratio: float, intervals_overlap: bool) -> bool:
    """Whether a step ratio (new over old) is a change: outside the noise and beyond 5 %."""
    return not intervals_overlap and abs(ratio - 1) > STEP_LIMIT


def is_peak_change(old: int | None, new: int | None) -> bool:
    """Whether a peak (bytes) changed: by more than 2 % of the old one, or more than 16 MiB."""
    if old is None or new is None:
        return False
    moved = abs(new - old)
    return moved > PEAK_LIMIT * old or moved > PEAK_LIMIT_BYTES


def _peak_change(change: Change) -> float | None:
    if not change.old_peak_bytes or change.new_peak_bytes is None:
        return None
    return change.new_peak_bytes / change.old_peak_bytes - 1


def _outcome(change: Change) -> str:
    still = "" if change.new_status == "ok" else f"still {change.new_status}"
    return change.words or still


COLUMNS = (
    Column("Recipe", lambda c: c.label),
    Column("Old ms", lambda c: c.old_step_seconds, "ms"),
    Column("New ms", lambda c: c.new_step_seconds, "ms"),
    Column("Step x", lambda c: c.step_ratio, "ratio"),
    Column("Old GiB", lambda c: c.old_peak_bytes, "gib"),
    Column("New GiB", lambda c: c.new_peak_bytes, "gib"),
    Column("Peak %", _peak_change, "change"),
    Column("Loss", lambda c: c.loss_distance, "distance"),
    Column("Changed", _outcome, "flag"),
)


def compare(old: Path, new: Path) -> Comparison:
    """Compare the result sets of two folders."""
    sides = []
    for folder in (old, new):
        results, skipped = result.load_all(Path(folder))
        sides.append(build(results, skipped, read_suite(Path(folder))))
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
    )


def _entries(report: Report) -> dict[Spec, Row | Unfinished]:
    """The row of each spec; one that was measured goes before a repetition that was not."""
    gone = {dataclasses.replace(u.result.spec, repeat=0): u for u in report.unfinished}
    rows = {
        dataclasses.replace(row.spec, repeat=0): row
        for group in report.groups
        for row in group.rows
    }
    return {**rows, **{spec: u for spec, u in gone.items() if spec not in rows}}


def _name(spec: Spec) -> str:
    return str(spec).removeprefix("--recipe ")


def _change(spec: Spec, old: Row | Unfinished, new: Row | Unfinished) -> Change:
    status = [e.status.value if isinstance(e, Unfinished) else "ok" for e in (old, new)]
    facts: dict[str, Any] = {
        "label": spec.recipe,
        "old_status": status[0],
        "new_status": status[1],
        **_side("old", old),
        **_side("new", new),
    }
    if isinstance(old, Row) and isinstance(new, Row):
        a, b = old.numbers, new.numbers
        ends = [(n.step_seconds_p10, n.step_seconds_p90) for n in (a, b)]
        facts |= {
            "step_ratio": b.step_seconds_median / a.step_seconds_median,
            "intervals_overlap": derive.overlap(*ends),
            "loss_distance": derive.curve_distance(new.first.losses, old.first.losses),
        }
    return Change(**facts)


def _side(side: str, entry: Row | Unfinished) -> dict[str, Any]:
    if isinstance(entry, Unfinished):
        return {}
    return {
        f"{side}_step_seconds": entry.numbers.step_seconds_median,
        f"{side}_peak_bytes": entry.numbers.peak_bytes,
    }


def environment_differences(old: Report, new: Report) -> list[tuple[str, str, str]]:
    """(fact, old, new) for each fact of the environment that differs; all values a set has."""
    before, after = (_facts(report) for report in (old, new))
    names = [name for name in dict.fromkeys([*before, *after]) if name not in surroundings.PASSING]
    sides = [(n, before.get(n, units.NONE), after.get(n, units.NONE)) for n in names]
    return [(name, a, b) for name, a, b in sides if a != b]


def _facts(report: Report) -> dict[str, str]:
    rows = [row for group in report.groups for row in group.rows]
    return {n: " / ".join(sorted(values)) for n, values in surroundings.merged(rows).items()}
