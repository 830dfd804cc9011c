"""By which meter a story's numbers are: that of a step, where its tables are of a step's peak."""

from __future__ import annotations

from harness.report import stories
from harness.report.data.lookup import step_meter
from harness.report.data.rows import Report, Row
from harness.report.rendering import sentences

__all__ = ["story_stamp"]

METERS = {
    "allocator": "live tensors, by the caching allocator",
    "trace": "live tensors, by a trace of that step",
}
"""What ``lookup.step_meter`` says -> in words."""


def story_stamp(report: Report) -> str:
    """What the numbers of a story's page are, and what they cannot be compared with; of a report
    with at least one group.

    Counted over the rows, not taken from the device: rows that one meter did not reach are named.
    """
    group = report.groups[0]
    if report.suite.story not in stories.OF_A_STEP:
        return sentences.stamp(group)
    rows = [row for group in report.groups for row in group.rows]
    said = {word: [row for row in rows if step_meter(row) == word] for word in (*METERS, None)}
    meters = [_meter(word, found, rows) for word, found in said.items() if word and found]
    parts = [f"Peaks on this page are of one training step: {'; '.join(meters)}."] if meters else []
    if said[None]:
        parts.append(f"Without one: {', '.join(row.label for row in said[None])}.")
    if group.meter == "cuda":
        return " ".join([f"Measured on {group.device}.", *parts])
    where = f"Measured without a GPU, on CPU processes ({group.device})."
    return " ".join([where, *parts, "These numbers are NOT comparable with a GPU's."])


def _meter(word: str, found: list[Row], rows: list[Row]) -> str:
    return METERS[word] + ("" if len(found) == len(rows) else f" ({len(found)} rows)")
