"""Tables of pages that are made from records and from published reports.

``main`` writes the reports in docs/results anew from their raw results, and their tables on pages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from harness import ROOT
from harness.report import write_report
from harness.result import load_all

RESULTS = ROOT / "docs/results"
QUESTIONS = [ROOT / f"docs/how-to/questions-{name}.md" for name in ("fit", "why", "later")]
"""The pages of questions, in order."""
BLOCK = re.compile(r"^```\n(\./run\.sh (?:plan|oom) [^\n]+)\n(.*?)^```", re.S | re.M)
"""A command and its shortened output on these pages."""
PUBLISHED = {
    "docs/reference/claims.md": {"cpu-2-cores-claims": 5},
    "docs/reference/results.md": {
        "cpu-2-cores-ladder": 1,
        "cpu-2-cores-sharding": 1,
        "cpu-2-cores-vocabulary": 1,
    },
    "docs/reference/results-sampling.md": {
        "cpu-2-cores-quality": 2,
        "cpu-2-cores-sampling": 1,
        "cpu-2-cores-distilled": 1,
    },
}
"""Page -> result set -> how many tables of the set's reports stand on the page."""


def line(cells: Sequence[str]) -> str:
    """A row of a table; what is empty takes one blank."""
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def anew(page: str, lines: Sequence[str]) -> str:
    """The page with the table that begins with the first of these lines made anew.

    Raises:
        ValueError: the page has no such table.
    """
    before, head, rest = page.partition(lines[0] + "\n")
    if not head:
        raise ValueError(f"there is no table that begins with {lines[0]!r}")
    after = rest.splitlines(keepends=True)
    while after and after[0].startswith("|"):
        del after[0]
    return before + "\n".join(lines) + "\n" + "".join(after)


def tables(*texts: str) -> list[str]:
    """The tables of Markdown texts, in order."""
    return [table for text in texts for table in re.findall(r"(?:^\|.*\n)+", text, re.M)]


def _reports(folder: Path) -> list[str]:
    return tables(*(path.read_text() for path in sorted(folder.glob("*.md"))))


def main() -> None:
    """Write the reports of all published sets, and their tables on pages, anew."""
    for folder in sorted(path.parent for path in RESULTS.glob("*/suite.json")):
        before = _reports(folder)
        write_report(*load_all(folder), folder)
        changed = dict(zip(before, _reports(folder), strict=True))
        for page in [ROOT / name for name, sets in PUBLISHED.items() if folder.name in sets]:
            text = page.read_text()
            for table in tables(text):
                text = text.replace(table, changed.get(table, table))
            page.write_text(text)
    (ROOT / "docs/reference/claims.md").write_text(
        (RESULTS / "cpu-2-cores-claims/claims.md").read_text()
    )
