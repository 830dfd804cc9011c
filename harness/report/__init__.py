"""Reports: pure functions of results. The only place where numbers are derived; no torch.

``write_report`` writes report.md, .csv, .json and .html; ``print_report`` prints to a terminal;
``compare`` sets two result sets against each other.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.report import export, html, markdown
from harness.report.compare import Comparison, compare
from harness.report.grouping import build
from harness.report.predicted import read_predictions
from harness.report.rows import Report, Suite, read_suite
from harness.result import Result

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Comparison",
    "Report",
    "Suite",
    "build",
    "compare",
    "print_report",
    "read_suite",
    "write_report",
]

FORMATS = {
    "report.md": markdown.render,
    "report.csv": export.csv_text,
    "report.json": export.json_text,
    "report.html": html.render,
}


def write_report(
    results: Sequence[Result],
    skipped: Sequence[str],
    folder: Path,
    reference: str | None = None,
) -> list[Path]:
    """Write every format to ``folder``; the paths written.

    ``folder/suite.json`` may name the suite and its reference row; ``reference``, the recipe of
    another one, goes before it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    suite = _with_reference(read_suite(folder), reference)
    report = build(list(results), list(skipped), suite, read_predictions(folder))
    paths = [_write(folder / name, render(report)) for name, render in FORMATS.items()]
    if suite.story:
        paths.append(_write(folder / f"{suite.story}.md", markdown.render_story(report)))
    return paths


def print_report(
    results: Sequence[Result],
    skipped: Sequence[str],
    console: Console,
    *,
    suite: Suite | None = None,
    reference: str | None = None,
    folder: Path | None = None,
) -> None:
    """Print the ranking, the answers and what did not finish.

    ``folder`` is where predictions lie beside the results.
    """
    from harness.report import terminal

    suite = _with_reference(suite or Suite(), reference)
    predictions = read_predictions(folder) if folder else {}
    terminal.render(build(list(results), list(skipped), suite, predictions), console)


def _with_reference(suite: Suite, reference: str | None) -> Suite:
    return dataclasses.replace(suite, reference=reference) if reference else suite


def _write(path: Path, text: str) -> Path:
    """Write beside, then move into place: a reader never sees half a report."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
    return path
