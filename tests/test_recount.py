"""Every table of README and docs is what its raw results say, recounted by code that shares
nothing with the reports'; and whatever is changed in a table or in a raw result is found."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.recount import house, prose
from tests.recount.check import group_of, page_faults, report_faults, table_faults
from tests.recount.pages import Table, Text, items
from tests.recount.raw import ResultSet

ROOT = house.ROOT
SETS = sorted(p for p in (ROOT / house.RESULTS).iterdir() if p.is_dir())
MADE = sorted(p for p in (ROOT / "tests/golden/report").iterdir())
"""Sets built by hand: with GPUs, repetitions, and rows of every ending."""
PAGES = [ROOT / "README.md"]
PAGES += [page for name in ("docs", "docs/adding") for page in sorted((ROOT / name).glob("*.md"))]
CODE = sorted((ROOT / "tests/recount").glob("*.py"))


# ---- the pages, as they are ----


@pytest.mark.parametrize("folder", [*SETS, *MADE], ids=lambda p: p.name)
def test_reports_are_what_their_raw_results_say(folder):
    assert list(house.set_faults(folder)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tables_of_pages_are_what_the_raw_results_say(page):
    assert list(house.page_faults_of(page)) == []


def test_every_page_sentence_and_set_is_recounted(monkeypatch):
    """The sentences here; sets and pages above, which are all that there are."""
    asked = []
    monkeypatch.setattr(house, "set_faults", lambda folder: asked.append(folder) or [])
    monkeypatch.setattr(house, "page_faults_of", lambda page, root: asked.append(page) or [])
    assert list(house.faults()) == []
    assert asked == [*SETS, *PAGES]
    assert len(SETS) >= 3
    measured = [page for page, _ in house.SOURCES]
    assert {"README.md", "docs/claims.md", "docs/suites.md"} <= set(measured)


@pytest.mark.parametrize("file", house.HELD.values())
def test_a_table_that_another_test_holds_has_that_test(file):
    assert (ROOT / file).is_file()


# ---- no code is shared ----


def outside(text: str) -> set[str]:
    """The modules that a source imports, but for those of the recount."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "." * node.level)
    return {name for name in found if name.split(".")[:2] != ["tests", "recount"]}


@pytest.mark.parametrize("path", CODE, ids=lambda p: p.name)
def test_the_recount_imports_the_standard_library_alone(path):
    text = path.read_text()
    assert {name.partition(".")[0] for name in outside(text)} <= sys.stdlib_module_names
    assert "importlib" not in text and "subprocess" not in text and "exec(" not in text


def bodies(paths: list[Path]) -> Iterator[str]:
    """What each function of more than a line does, without its names and words."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                code = node.body[1:] if ast.get_docstring(node) else node.body
                dump = " ".join(ast.dump(part) for part in code)
                if len(code) > 1 or dump.count("(") > 25:
                    yield dump


def test_no_function_is_a_copy_of_the_reports():
    reports = set(bodies(sorted((ROOT / "harness").rglob("*.py"))))
    ours = list(bodies(CODE))
    assert len(ours) > 50 and len(reports) > 500
    assert [dump for dump in ours if dump in reports] == []


def test_an_import_of_the_harness_is_noticed():
    assert outside("from harness.report.data import derive\nimport json") - {"json"}
    assert outside("import harness.result as result\nfrom tests.recount import raw")
    assert not outside("from tests.recount.raw import Row")


# ---- a table that is changed ----


def bumped(text: str) -> str:
    """The last digit of a cell, one more; the case of a cell without digits, turned."""
    digits = list(re.finditer(r"\d", text))
    if not digits:
        return text.swapcase() if text.strip("- ") else "1"
    at = digits[-1].start()
    return text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]


def bent(table: Table, line: int, column: int) -> Table:
    lines = [list(cells) for cells in table.lines]
    lines[line][column] = bumped(lines[line][column])
    return dataclasses.replace(table, lines=lines)


def tables_of(page: Path, results: ResultSet) -> Iterator[tuple[Table, Any]]:
    """A page's tables, each with the group that it is about."""
    every, group = list(items(page)), None
    for place, item in enumerate(every):
        if isinstance(item, Text):
            group = group_of(every[place:], results, item.text) or group
        else:
            yield item, group


SHOWN = [(folder, "report.md") for folder in (*SETS[:1], *MADE)] + [
    (folder, page.name) for folder in SETS[1:] for page in sorted(folder.glob("[cel]*.md"))
]
SHOWN += [(folder, "report.md") for folder in SETS if folder.name.endswith("-quality")]


@pytest.mark.parametrize(("folder", "name"), SHOWN, ids=lambda v: getattr(v, "name", v))
def test_a_digit_that_is_changed_is_found_in_every_column(folder, name):
    results, seen = ResultSet(folder), 0
    for table, group in tables_of(folder / name, results):
        assert list(table_faults(table, results, group)) == []
        for column in range(len(table.heads)):
            line = (3 * column + 1) % len(table.lines)
            if table.heads[column] == "Who says so":
                continue  # words that no raw result has
            wrong = list(table_faults(bent(table, line, column), results, group))
            assert wrong, (table.title, table.heads[column], table.lines[line])
            seen += 1
    assert seen >= 4


def bump(match: re.Match[str]) -> str:
    return bumped(match[0])


CHANGES: dict[str, tuple[str, str, str | Callable[[re.Match[str]], str]]] = {
    "a digit of README": ("README.md", r"(?<=\| )\d+\.\d+(?= \|)", bump),
    "a row of README is gone": ("README.md", r"^\| \d+ \| `.*\n", ""),
    "two rows of README are exchanged": (
        "README.md",
        r"^(\| \d+ \| `.*\n)(\| \d+ \| `.*\n)",
        r"\2\1",
    ),
    "an unknown column": ("README.md", r"^(\| # .*) Notes \|$", r"\1 Joules |"),
    "an unknown table": ("docs/limits.md", r"\Z", "\n| GPU | GiB |\n|---|--:|\n| H100 | 80 |\n"),
    "a table is gone": ("docs/suites.md", r"^\| What was added(.*\n\|)*.*\n", ""),
    "a verdict": ("docs/claims.md", r"\| (does not hold|holds) here", "| cannot be told here:"),
    "a claim's number": ("docs/claims.md", r"(?<=peak )[+-][\d.]+(?=%)", bump),
    "a claim's limit": ("docs/claims.md", r"(?<=limit for large batches )[+-][\d.]+(?=%)", bump),
    "a crossing": ("docs/claims.md", r"here only (from|up to) batch [\d.]*\d", bump),
    "a neighbour of a crossing": ("docs/claims.md", r"(?<=, between )\d+(?= \()", bump),
    "a saving at a batch": ("docs/claims.md", r"(?<=\| )[+-]\d+\.\d(?= %)", bump),
    "how far a limit is known": ("docs/claims.md", r"(?<=%) \((of two points|\+-[\d.]+)\)", " (?)"),
    "a power": ("docs/claims.md", r"(?<=to the power )\d\.\d+", bump),
    "how far a power is known": ("docs/claims.md", r"(?<= \+- )0\.\d+", bump),
    "a predicted verdict": (
        "docs/claims.md",
        r"\| (holds at every|holds only from)",
        "| does not hold",
    ),
    "a predicted speed": ("docs/claims.md", r"(?<=speed x)\d\.\d+(?= \(x)", bump),
    "how far a speed is known": ("docs/claims.md", r"(?<= to x)\d+\.\d+(?=\)|:)", bump),
    "what a row of samples weighs": ("docs/sampling.md", r"(?<=\| )\d+\.\d+(?= \|)", bump),
    "how far samples are": ("docs/sampling.md", r"(?<=by design )\d\.\de-\d+", bump),
    "samples taken for the same": ("docs/sampling.md", r"\d+(?=% of \d+ samples taken)", bump),
    "a verdict on inference": (
        "docs/sampling.md",
        r"\| (does not hold|holds) here",
        "| not measured",
    ),
    "the card": ("docs/claims.md", r"on one A100-80GB \([\d.]+", bump),
    "a sibling's digits": ("docs/distil.md", r"(?<=\| )12\.0(?= \|)", bump),
    "how far a student draws": ("docs/distil.md", r"(?<=by design )2\.3e-01", bump),
    "the ladder's saving": ("docs/suites.md", r"(?<=\| )-\d+\.\d(?= %)", bump),
    "what an engine holds": ("docs/suites.md", r"(?<=`hsdp` \| )\d\.\d+", bump),
    "an engine is gone": ("docs/suites.md", r"^\| `fsdp2\+tp` .*\n", ""),
    "a sentence": ("docs/plan.md", r"\d+(?= MiB above the prediction)", bump),
    "a sentence is gone": ("docs/plan.md", r"the tensors of a step in all", "and tensors"),
}
"""What is changed -> page, where it is by its surroundings, and what comes in its place."""


@pytest.fixture
def copy(tmp_path) -> Path:
    """The pages, to be changed, and the result sets as they are, without pictures."""
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*")]:
        if path.suffix in (".md", ".json", ".csv", ".html"):
            target = tmp_path / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                shutil.copyfile(path, target)
            else:
                target.symlink_to(path)
    return tmp_path


@functools.cache
def faults_of(page: str) -> list[str]:
    """Of a page as it is, and of the sentences."""
    return [*house.page_faults_of(ROOT / page), *prose.faults(ROOT)]


@pytest.mark.parametrize("name", CHANGES)
def test_a_page_that_is_changed_is_found(copy, name):
    page, pattern, new = CHANGES[name]
    text = (copy / page).read_text()
    changed = re.sub(pattern, new, text, count=1, flags=re.M)
    assert changed != text, "the pattern of this control is not on the page any more"
    (copy / page).write_text(changed)
    found = [*house.page_faults_of(copy / page, copy), *prose.faults(copy)]
    before = faults_of(page)
    assert [fault for fault in set(found) - set(before) if fault.startswith(page)]


# ---- a report that is changed ----


def test_a_group_that_a_report_leaves_out_is_found(tmp_path):
    (claims,) = [folder for folder in SETS if folder.name.endswith("claims")]
    text = (claims / "report.md").read_text()
    page = tmp_path / "report.md"
    heads = [match.start() for match in re.finditer(r"^## DiT", text, re.M)]
    page.write_text(text[: heads[-1]])
    results = ResultSet(claims)
    assert any("groups are shown" in fault for fault in report_faults(page, results))
    assert len(heads) == len(results.groups) > 3


def test_a_row_that_a_sentence_names_wrongly_is_found(tmp_path):
    results = ResultSet(SETS[0])
    text = (SETS[0] / "report.md").read_text()
    answers = dict(re.findall(r"^- \*\*(.*?)\*\*: `([^`]+)`", text, re.M))
    assert {"Fastest", "Least memory", "Best trade"} <= set(answers)
    other = next(row.label for row in results.rows if row.label not in answers.values())
    for question in answers:
        changed = re.sub(rf"(\*\*{question}\*\*): `[^`]+`", rf"\1: `{other}`", text)
        assert changed != text
        (tmp_path / "report.md").write_text(changed)
        found = page_faults(tmp_path / "report.md", results, [])
        assert any(f"{question} is " in fault for fault in found), question


@pytest.mark.parametrize("folder", [SETS[0], *MADE], ids=lambda p: p.name)
def test_every_number_above_a_ranking_is_recounted(tmp_path, folder):
    """Each of the warnings, the answers, what fits, the predictions and the noise floor."""
    results = ResultSet(folder)
    text = (folder / "report.md").read_text().partition("\n#: one more")[0]
    start, end = text.index("\n> **Measured"), text.index("\n| # |")
    page = tmp_path / "report.md"
    page.write_text(text)
    cut = set(report_faults(page, results))  # tables behind the first ranking are gone
    numbers = r"(?<![\w:=`.])[+-]?\d+(\.\d+)?(e[+-]\d+)?(?![\w/]|\.\d)"
    spans = [m.span() for m in re.finditer(numbers, text[start:end])]
    assert len(spans) > 15
    for low, high in spans:
        said = text[start + low : start + high]
        page.write_text(text[: start + low] + bumped(said) + text[start + high :])
        around = text[start + low - 30 : start + high + 30]
        assert set(report_faults(page, results)) - cut, (said, around)
