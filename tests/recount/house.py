"""Every page of the repository with a table of numbers, and the raw results that it is about."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.recount import calibrated, prose
from tests.recount.check import page_faults, report_faults
from tests.recount.export import csv_faults, json_faults
from tests.recount.pages import Table, items
from tests.recount.raw import ResultSet

__all__ = ["RESULTS", "ROOT", "faults", "page_faults_of", "set_faults"]

ROOT = Path(__file__).parents[2]
RESULTS = "docs/results"
SOURCES = {
    ("README.md", "What you get"): "cpu-2-cores",
    ("docs/suites.md", "The ladder"): "cpu-2-cores-ladder",
    ("docs/suites.md", "Each against the reference"): "cpu-2-cores-sharding",
    ("docs/claims.md", "Claims, measured on "): "cpu-2-cores-claims",
    ("docs/claims.md", "The peak over batches"): "cpu-2-cores-claims",
    ("docs/claims.md", "What memory beyond the state grows with"): "cpu-2-cores-claims",
    ("docs/claims.md", "Predicted for DiT-XL/2: the peak over batches"): "cpu-2-cores-claims",
    ("docs/distil.md", "Memory against samples, beside siblings"): "cpu-2-cores-distilled",
    ("docs/claims.md", "Predicted for DiT-XL/2: what memory beyond"): "cpu-2-cores-claims",
    ("docs/sampling.md", "Memory against samples, of trained digits"): "cpu-2-cores-quality",
    ("docs/sampling.md", "Claims on inference"): "cpu-2-cores-quality",
    ("docs/sampling.md", "Memory against samples and speed"): "cpu-2-cores-sampling",
    ("docs/models.md", "Memory against vocabulary"): "cpu-2-cores-vocabulary",
}
"""Page and how the title of a table of numbers begins -> the result set that it is about."""
WORDS = {
    ("module", "what it is"),
    ("parameter of distill", "what it is"),
    ("command", "what it does", "read on"),
    ("strategy", "place", "what it does", "losses"),
    ("suite", "what it tells"),
    ("strategy", "what it does here", "evidence"),
    ("station", "what"),
    ("Goal", "Measured"),
    ("file", "what it is"),
    ("--data", "what it is"),
    ("--data", "what it is", "of the models"),
    ("to add or change", "page", "files it touches"),
    ("file", "what to write there"),
    ("name", "field of Numbers", "what it is"),
    ("promise", "test"),
    ("file", "what to change there"),
    ("you have", "you type"),
    ("what happens", "the row"),
    ("torch", "tried how"),
    ("name", "what it is"),
    ("phase", "what is counted", "ways"),
    ("trainer", "adapters over bfloat16 weights", "where it is decided"),
    ("command", "rehearsed on", "what was seen"),
    ("minutes", "command", "shows, which no rehearsal does"),
}
"""Heads of the tables that measure nothing."""
HELD = {
    ("vocabulary", "full", "chunked", "fused", "saved at most"): "tests/predict/test_vocabulary.py",
    ("preset", "elements", "published", "objective", "usual sample"): (
        "tests/subjects/test_library.py"
    ),
    (
        *("run", "source", "settings", "reserved", "predicted", ""),
        *("allocated", "predicted", "", "between steps", "predicted", ""),
    ): "tests/test_public_peaks.py",
    ("run", "card", "seconds a step", "predicted", "plus or minus", "", "within"): (
        "tests/test_public_peaks.py"
    ),
    ("what", "source", "settings", "reserved", "predicted", "", "figure chosen on it"): (
        "tests/predict/test_planned_phases.py"
    ),
    ("family", "ddp", "zero2", "zero3", "lora", "checkpoint"): (
        "tests/strategies/test_publics_launched.py"
    ),
}
"""Heads of the tables whose numbers come from no result set -> the test that holds them."""


def faults(root: Path = ROOT) -> Iterator[str]:
    """Mismatches of all pages and of all result sets."""
    for folder in sorted(p for p in (root / RESULTS).iterdir() if p.is_dir()):
        yield from set_faults(folder)
    folders = [root / "docs", root / "docs/adding"]
    for page in [root / "README.md", *(page for f in folders for page in sorted(f.glob("*.md")))]:
        yield from page_faults_of(page, root)
    yield from prose.faults(root)


def set_faults(folder: Path) -> Iterator[str]:
    """Mismatches of a result set's own reports."""
    checks: dict[str, Callable[[Path, ResultSet], Iterator[str]]] = {
        "report.md": report_faults,
        "report.html": report_faults,
        "report.csv": csv_faults,
        "report.json": json_faults,
    }
    results = ResultSet(folder)
    for name, check in checks.items():
        if (folder / name).exists():
            yield from (f"{folder.name}/{name}: {fault}" for fault in check(folder / name, results))
    for page in sorted(set(folder.glob("*.md")) - {folder / "report.md"}):
        yield from (f"{folder.name}/{page.name}: {f}" for f in page_faults(page, results, []))


def _elsewhere(heads: list[str]) -> bool:
    """Whether tests of predictions hold a table: of memory's classes, and of rehearsed rows."""
    return list(heads[:2]) in (["class", "what it is"], ["cards", "recipe"]) or "shows" in heads


def page_faults_of(page: Path, root: Path = ROOT) -> Iterator[str]:
    """Mismatches of the tables of one page."""
    name, read = str(page.relative_to(root)), functools.cache(ResultSet)  # once for all tables
    for item in items(page):
        if (
            isinstance(item, Table)
            and tuple(item.heads) not in {*WORDS, *HELD}
            and not _elsewhere(item.heads)
        ):
            if is_of(item, name, calibrated.PLACE):
                yield from (f"{name}: {fault}" for fault in calibrated.faults(item, root))
                continue
            source = next((s for s in SOURCES if is_of(item, name, s)), None)
            if source is None:
                yield f"{name}: no raw results are named here for a table of {item.heads}"
                continue
            results = read(root / RESULTS / SOURCES[source])
            yield from (f"{name}: {f}" for f in page_faults(page, results, [], [item]))
    tables = [item for item in items(page) if isinstance(item, Table)]
    for source in SOURCES:
        if source[0] == name and not any(is_of(table, name, source) for table in tables):
            yield f"{name}: the table {source[1]!r} is gone"


def is_of(table: Table, page: str, source: tuple[str, str]) -> bool:
    return page == source[0] and table.title.startswith(source[1])
