"""Tables of pages, and the published report."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness import ROOT
from harness.report import write_report
from harness.result import load_all

PUBLISHED = ROOT / "docs/results/cpu-2-cores-default"
"""The results of README's first command."""
BLOCK = re.compile(r"^```\n(\./run\.sh (?:plan|oom) [^\n]+)\n(.*?)^```", re.S | re.M)
"""A command and its shortened output on these pages."""


def line(cells: Sequence[str]) -> str:
    """A row of a table; what is empty takes one blank."""
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def tables(*texts: str) -> list[str]:
    """The tables of Markdown texts, in order."""
    return [table for text in texts for table in re.findall(r"(?:^\|.*\n)+", text, re.M)]


def report() -> str:
    """Return the Markdown report of the published results, made anew."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / PUBLISHED.name
        shutil.copytree(
            PUBLISHED, folder, ignore=shutil.ignore_patterns("report.*", ".headroom.json")
        )
        write_report(*load_all(folder), folder)
        return (folder / "report.md").read_text(encoding="utf-8")
