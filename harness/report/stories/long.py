"""The story "long": how memory and time of a step grow with the tokens of a sample."""

from __future__ import annotations

from harness.data.feed import check_data
from harness.report.data.grid import Grid, text_grid
from harness.report.data.rows import Report, Row
from harness.report.figures import units
from harness.report.stories import depth
from harness.subjects.dit.presets import shape_of

__all__ = ["tables"]

NOTE = (
    "T: tokens of a sample. Memory: the most that one step held at once beyond parameters, "
    "gradients, optimizer state and average, on the fullest rank; ranks that share samples (sp) "
    "hold a part of the tokens each. All rows take the same samples a step. Powers: least squares "
    "through the logarithms; what does not depend on tokens flattens them. Behind +-: how far the "
    "noise floor lets the power of time lie from it, where a row was measured more than once."
)


def tables(report: Report) -> list[Grid]:
    """One line a recipe: memory beyond the state and time at each length, and how they grow."""
    points_of = depth.series(report, tokens)
    processes = _processes(report)
    lengths = sorted({p.at for points in points_of.values() for p in points})
    columns = [depth.memory_at(length, points_of) for length in lengths]
    columns += [_milliseconds_at(length, points_of) for length in lengths]
    lines = [
        [recipe, str(processes[recipe]), *cells, *_growth(points_of[recipe])]
        for recipe, *cells in zip(points_of, *columns, strict=True)
    ]
    kinds = {"Recipe": "text", "Processes": "count", **{f"T={n} MiB": "mib" for n in lengths}}
    kinds |= {f"T={n} ms": "ms" for n in lengths}
    kinds |= {"Memory ~ T^": "ratio", "Step time ~ T^": "text"}
    return [text_grid("long", "Memory a rank and time against tokens", kinds, lines, NOTE)]


def tokens(row: Row) -> int:
    """Tokens of one sample of a row of a DiT."""
    of_frame = shape_of(row.spec.model).tokens(check_data(row.spec.data).input_size)
    return of_frame * max(1, row.spec.frames)


def _processes(report: Report) -> dict[str, int]:
    """Recipe -> on how many processes it ran."""
    rows = [row for group in report.groups for row in group.rows]
    return {row.spec.recipe: row.spec.processes for row in rows}


def _milliseconds_at(length: int, points_of: dict[str, list[depth.Point]]) -> list[str]:
    """The cells of one length: each recipe's milliseconds a step, or a dash."""
    seconds = [{p.at: p.seconds for p in points} for points in points_of.values()]
    return units.column("ms", [by_length.get(length) for by_length in seconds])


def _growth(points: list[depth.Point]) -> list[str]:
    return [depth.power([(p.at, p.beyond) for p in points]), depth.time_power(points)]
