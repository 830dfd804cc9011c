"""Parts of pages that the code generates: commands, strategies, suites, trainers and columns.

``python -m docs.make.parts`` writes them, and the published report. A part lies between
``<!-- made: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from docs.make import accuracy, public_rows
from harness import ROOT, cli
from harness.commands import listing
from harness.planner.export import trainers as tables_of
from harness.planner.uncertainty import CLASSES, share_of
from harness.report import write_report
from harness.resolve import resolve
from harness.result import load_all
from harness.spec import Spec
from harness.subjects.library import families
from harness.suite import file as suite_file
from strategies import CATALOG
from strategies.base import parity
from tests.made.translated import REAL

FOLDERS = ("harness", "strategies")
PUBLISHED = ROOT / "docs/results/cpu-2-cores-default"
"""The results of README's first command."""
REPORT = PUBLISHED / "report.md"
BLOCK = re.compile(r"^```\n(\./run\.sh (?:plan|oom) [^\n]+)\n(.*?)^```", re.S | re.M)
"""A command and its shortened output on a page."""

PART = re.compile(r"(<!-- made: (\w+) -->\n).*?(?=<!-- end -->)", re.S)
RANKING = ("Recipe", "Samples/s", "x ref", "Peak GiB", "vs ref %", "Loss vs ref", "Notes")
"""Columns of README's table."""
NUMBERS = {*RANKING[1:5], "rows on a CPU", "elements", "published"}
"""Heads of columns that are aligned to the right."""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; what is empty takes one blank."""
    rule = ("--:|" if head in NUMBERS else "---|" for head in heads)
    cells = ("".join(f" {cell} |" if cell else " |" for cell in row) for row in (heads, *rows))
    first, *others = (f"|{row}" for row in cells)
    return "\n".join([first, "|" + "".join(rule), *others])


def commands() -> str:
    """Return the table of the commands of ``./run.sh``."""
    (choices,) = (
        action.choices
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    rows = []
    for name, parser in choices.items():
        told = " ".join((parser.description or "").rstrip(".").split())
        pages = re.findall(r"docs/([\w/-]+)\.md", (parser.epilog or "").partition("read on: ")[2])
        links = ", ".join(f"[{page.rpartition('/')[2]}](../{page}.md)" for page in pages)
        rows.append((f"`./run.sh {name}`", told, links))
    return _table(("command", "what it does", "read on"), rows)


def strategies() -> str:
    """Return the table of the strategies."""
    rows = (
        (f"`{name}`", kind.slot.name.lower().replace("_", " "),
         listing.first_sentence(kind.__doc__).rstrip("."), parity(kind.alters))
        for name, kind in CATALOG.items()
    )  # fmt: skip
    return _table(("strategy", "slot", "what it does", "losses"), rows)


def suites() -> str:
    """Return the table of the suites that come along."""
    found = {name: suite_file.load_suite(name, "cpu") for name in suite_file.known_suites()}
    rows = ((f"`{n}`", s.title, f"`{s.reference}`", str(len(s.rows))) for n, s in found.items())
    return _table(("suite", "what it compares", "reference", "rows on a CPU"), rows)


def report() -> str:
    """Return the Markdown report of the published results, made anew."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / PUBLISHED.name
        ours = shutil.ignore_patterns("report.*", ".headroom.json")
        shutil.copytree(PUBLISHED, folder, ignore=ours)
        write_report(*load_all(folder), folder)
        return (folder / "report.md").read_text(encoding="utf-8")


def headline() -> str:
    """Return the published report's answer in one sentence."""
    return "> " + re.search(r"^\*\*(.+)\*\*$", REPORT.read_text("utf-8"), re.M)[1]


def ranking() -> str:
    """Return README's rows and columns of the published ranking."""
    found = re.search(r"^\| # \| Recipe \|.*\n(?:^\|.*\n)+", REPORT.read_text("utf-8"), re.M)[0]
    heads, _, *rows = ([cell.strip() for cell in x.split("|")[1:-1]] for x in found.splitlines())
    chosen = [heads.index(name) for name in RANKING]
    return _table(RANKING, ([row[i] for i in chosen] for row in rows))


def sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, without its period."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    return re.split(r"(?<=[a-z)`])[.] (?=[A-Z`])", " ".join(paragraph.split()))[0].rstrip(".")


def packages() -> str:
    """Return the table of the packages and the first sentence of each."""
    folders = [p for name in FOLDERS for p in sorted((ROOT / name).glob("*/__init__.py"))]
    every = sorted([ROOT / name / "__init__.py" for name in FOLDERS] + folders)
    rows = ((f"`{p.parent.relative_to(ROOT)}`", sentence(p).replace("``", "`")) for p in every)
    return _table(("package", "what it holds"), rows)


def trainers() -> str:
    """Return the table of the published configurations, with the recipe of each."""
    rows = []
    for name in tables_of.known():
        for one in REAL[name]["published"]:
            words = f"`./run.sh plan --from {' '.join(one['files'])} --gpu {one['gpu']}`"
            title = tables_of.table(name)["title"]
            rows.append((title, one["example"], words, f"`{one['recipe']}`"))
    return _table(("trainer", "its example", "command", "recipe"), rows)


def adapters() -> str:
    """Return the table of the types that trainers keep adapters in."""
    some = [tables_of.table(name) for name in tables_of.known()]
    rows = ((t["title"], t["adapter_type"]["is"], t["adapter_type"]["where"]) for t in some)
    heads = ("trainer", "adapters over bfloat16 weights", "where it is decided")
    return _table(heads, rows)


def summary() -> str:
    """Return the table of errors of all kept rows."""
    return _table(accuracy.HEADS, accuracy.summary())


def misses() -> str:
    """Return the table of public figures outside their stated range."""
    return _table(accuracy.MISSES, accuracy.misses())


def models() -> str:
    """Return the table of public models."""
    rows = []
    for name, known in families.table().items():
        objective, told = known.family.objectives[0], known.parameters
        shaped = resolve(Spec(recipe="single", model=name, data="synthetic", objective=objective))
        published = "equal"
        if isinstance(told["published"], str):
            published = told["published"].replace(" billion", " B")
        elif "other" in told:
            published = f"{told['published']:,}"
        elements, size = f"{told['built']:,}", shaped.subject.size_in_words
        rows.append((f"`{name}`", elements, published, objective, size))
    return _table(("preset", "elements", "published", "objective", "usual sample"), rows)


def classes() -> str:
    """Return the table of the stated ranges of memory, by class."""
    known = public_rows.residuals()
    told = ((words, share_of(kind, known)) for kind, words in CLASSES.items())
    rows = (
        (words, str(one.rows), str(one.sources), f"+-{one.share:.1%}{', of all' * one.pooled}")
        for words, one in told
    )
    return _table(("class", "rows", "sources", "stated range"), rows)


GENERATED = {
    "README.md": {"headline": headline, "ranking": ranking},
    "docs/architecture.md": {"packages": packages},
    "docs/explanation/accuracy.md": {"summary": summary, "classes": classes, "misses": misses},
    "docs/how-to/export.md": {"adapters": adapters, "trainers": trainers},
    "docs/reference/commands.md": {"commands": commands},
    "docs/reference/models.md": {"models": models},
    "docs/reference/strategies.md": {"strategies": strategies},
    "docs/reference/suites.md": {"suites": suites},
}
"""Page -> name of a part -> the function that generates it."""


def filled(page: str) -> str:
    """Return the text of ``page`` with its parts generated again.

    Raises:
        KeyError: the page has a part that no function generates.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    return PART.sub(lambda part: part[1] + GENERATED[page][part[2]]() + "\n", text)


if __name__ == "__main__":
    REPORT.write_text(report(), encoding="utf-8")
    for page in GENERATED:
        (ROOT / page).write_text(filled(page), encoding="utf-8")
