"""Reports: pure functions of results, and the only place that derives numbers. No torch.

``write_report`` writes report.md, .csv, .json and .html, and prints to a terminal. ``compare``
compares two result sets. Imports within the package go one way: anatomy ->
rendering -> data. Code outside the package imports from this module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.json_files import atomic_file
from harness.prediction import read_predictions
from harness.report.data.compare import Comparison, compare
from harness.report.data.grouping import build, of_usable
from harness.report.data.rows import Report, SuiteHead, read_suite
from harness.report.rendering import export, pages, terminal
from harness.report.rendering.terminal import render_comparison
from harness.result import Result

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Comparison",
    "Report",
    "SuiteHead",
    "build",
    "compare",
    "read_suite",
    "render_comparison",
    "write_report",
]

FORMATS = {
    "report.md": pages.render_markdown,
    "report.csv": export.csv_text,
    "report.json": export.json_text,
    "report.html": pages.render_html,
}


def write_report(
    results: Sequence[Result],
    skipped: Sequence[str],
    folder: Path,
    reference: str | None = None,
    lost: list[str] | None = None,
    console: Console | None = None,
) -> list[Path]:
    """Write every format to ``folder``, print the report to ``console``, and return the paths.

    ``folder/suite.json`` may name the suite and its reference row; the recipe ``reference``
    replaces that row. ``skipped`` has a line for each file that is no result.

    Args:
        lost: collects a line for each file that cannot be written, instead of an error.

    Raises:
        OSError: a file cannot be written, and ``lost`` is None.
    """
    folder = Path(folder)
    if lost is None:
        folder.mkdir(parents=True, exist_ok=True)
    suite = read_suite(folder)
    suite = dataclasses.replace(suite, reference=reference or suite.reference)
    left_out = [*skipped, *suite.skipped]
    predictions = read_predictions(folder, left_out)

    def rendered(report: Report) -> tuple[Report, dict[str, str]]:
        return report, {name: render(report) for name, render in FORMATS.items()}

    report, texts = of_usable(results, left_out, suite, predictions, rendered)
    paths = []
    for name, text in texts.items():
        path = folder / name
        try:
            with atomic_file(path) as stream:
                stream.write(text)
            paths.append(path)
        except OSError as error:
            if lost is None:
                raise
            lost.append(f"{path}: {error.strerror or error}")
    if console:
        terminal.render(report, console)
    return paths
