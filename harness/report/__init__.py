"""Reports: pure functions of results. The only place where numbers are derived; no torch.

``write_report`` writes report.md, .csv, .json and .html; ``print_report`` prints to a terminal;
``compare`` sets two result sets against each other. Imports within go one way:
anatomy -> rendering -> stories -> data. This module is for importers outside the report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.report.data.compare import Comparison, compare
from harness.report.data.grouping import build
from harness.report.data.rows import Report, SuiteHead, read_suite
from harness.report.figures.predicted import read_predictions
from harness.report.rendering import export, html, markdown
from harness.result import Result

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Comparison",
    "Report",
    "SuiteHead",
    "build",
    "compare",
    "print_comparison",
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
    lost: list[str] | None = None,
) -> list[Path]:
    """Write every format to ``folder``; the paths written.

    ``folder/suite.json`` may name the suite and its reference row; the recipe ``reference`` takes
    that row's place. ``skipped`` has a line for each file that was no result.

    Args:
        lost: takes a line for each file that cannot be written, in place of the error.

    Raises:
        OSError: a file cannot be written, and nobody asked which.
    """
    folder = Path(folder)
    if lost is None:
        folder.mkdir(parents=True, exist_ok=True)
    suite = _with_reference(read_suite(folder), reference)
    report = build(list(results), list(skipped), suite, read_predictions(folder))
    texts = {name: render(report) for name, render in FORMATS.items()}
    if suite.story:
        texts[f"{suite.story}.md"] = markdown.render_story(report)
    paths = []
    for name, text in texts.items():
        try:
            paths.append(_write(folder / name, text))
        except OSError as error:
            if lost is None:
                raise
            lost.append(f"{folder / name}: {error.strerror or error}")
    return paths


def print_report(
    results: Sequence[Result],
    skipped: Sequence[str],
    console: Console,
    *,
    suite: SuiteHead | None = None,
    reference: str | None = None,
    folder: Path | None = None,
) -> None:
    """Print the ranking, the answers and what did not finish.

    ``folder`` is where predictions lie beside the results.
    """
    from harness.report.rendering import terminal

    suite = _with_reference(suite or SuiteHead(), reference)
    predictions = read_predictions(folder) if folder else {}
    terminal.render(build(list(results), list(skipped), suite, predictions), console)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print what differs between two result sets."""
    from harness.report.rendering import terminal

    terminal.render_comparison(comparison, console)


def _with_reference(suite: SuiteHead, reference: str | None) -> SuiteHead:
    return dataclasses.replace(suite, reference=reference) if reference else suite


def _write(path: Path, text: str) -> Path:
    """Write beside, then move into place: a reader never sees half a report."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # Names of files may hold bytes that are no text.
        beside.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    return path
