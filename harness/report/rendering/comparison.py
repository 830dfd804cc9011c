"""A comparison of two result sets, as tables and as Markdown."""

from __future__ import annotations

import dataclasses

from harness.report.data.answers import MANY
from harness.report.data.compare import Change, Comparison
from harness.report.data.grid import Column, Grid, tabulate, text_grid
from harness.report.rendering.markdown_parts import plain, table_lines
from harness.report.rendering.sentences import first_of

__all__ = ["NOTE", "changes_grid", "environment_grid", "leftovers", "markdown", "shown", "summary"]

NOTE = (
    "Changed: the median step by more than Limit %, what equal rows may be apart from run to run "
    "(what a machine does from one day to another is not in it), or, where that is not known, by "
    "more than 5 % with p10 to p90 intervals that do not overlap; the memory that rows are "
    "ranked by, by more than 2 % or 16 MiB; a loss, a gradient norm, or what the optimizer did to "
    "a parameter, by more than rounding explains (docs/reading-a-report.md)."
)


def _outcome(change: Change) -> str:
    still = "" if change.new_status == "ok" else f"still {change.new_status}"
    return change.words or still


COLUMNS = (
    Column("Recipe", lambda c: c.label),
    Column("Old ms", lambda c: c.old_step_seconds, "ms"),
    Column("New ms", lambda c: c.new_step_seconds, "ms"),
    Column("Step x", lambda c: c.step_ratio, "ratio"),
    Column("Limit %", lambda c: c.step_limit_fraction, "percent"),
    Column("Old GiB", lambda c: c.old_need_bytes, "gib"),
    Column("New GiB", lambda c: c.new_need_bytes, "gib"),
    Column("Memory %", lambda c: c.need_change_fraction, "change"),
    Column("Loss", lambda c: c.loss_distance, "distance"),
    Column("Grad norm", lambda c: c.grad_norm_distance, "distance"),
    Column("Changed", _outcome, "flag"),
)


def markdown(comparison: Comparison) -> str:
    """The comparison as Markdown text."""
    lines = ["# Headroom: old against new", "", summary(comparison), "", comparison.basis, ""]
    if comparison.environment:
        lines += [*table_lines(environment_grid(comparison)), ""]
    if comparison.changes:
        lines += [*table_lines(changes_grid(shown(comparison))), "", NOTE, ""]
    lines += [f"- {plain(line)}" for line in leftovers(comparison)]
    return "\n".join(lines).rstrip() + "\n"


def summary(comparison: Comparison) -> str:
    """One sentence."""
    counts = f"{len(comparison.changes)} rows in both sets, {len(comparison.changed)} changed"
    if len(comparison.changes) > MANY:
        counts += f" (the table has at most {MANY} of these)"
    if comparison.environment:
        return f"{counts} beyond noise. Not the same environment: read the differences first."
    return f"{counts} beyond noise. Same environment."


def shown(comparison: Comparison) -> Comparison:
    """The comparison; of more than ``MANY`` rows those that changed, and of these the first."""
    if len(comparison.changes) <= MANY:
        return comparison
    return dataclasses.replace(comparison, changes=comparison.changed[:MANY])


def changes_grid(comparison: Comparison) -> Grid:
    """The rows that both sets have; those that changed are marked."""
    marks = [("alarm",) if change.words else () for change in comparison.changes]
    return tabulate("compare", "Rows", COLUMNS, comparison.changes, marks=marks)


def environment_grid(comparison: Comparison) -> Grid:
    """The facts of the environment that differ."""
    kinds = dict.fromkeys(("Differs", "Old", "New"), "text")
    return text_grid("environment", "Environment", kinds, [*map(list, comparison.environment)])


def leftovers(comparison: Comparison) -> list[str]:
    """A line for each row that only one set has, and for each file that was no result."""
    sides = (("old", comparison.only_old), ("new", comparison.only_new))
    lines = [f"only in the {side} set: {name}" for side, names in sides for name in names[:MANY]]
    lines += [
        f"only in the {side} set: {len(names) - MANY} more rows"
        for side, names in sides
        if len(names) > MANY
    ]
    return lines + [f"skipped: {line}" for line in first_of(comparison.skipped, "skipped files")]
