"""The numbers of every report are recounted from raw results by code that shares nothing with the
reports'; published reports and tables of pages are what the code makes of these results.

``PYTHONPATH=. python tests/test_docs.py`` makes both anew.
"""

from __future__ import annotations

import ast
import csv
import functools
import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import ROOT
from harness.report import write_report
from harness.report.figures import floor
from harness.result import load, load_all
from tests.made.pages import RESULTS
from tests.recount import noise
from tests.recount.numbers import OF_A_ROW, RAW, UNFINISHED, differs, faults
from tests.recount.raw import ResultSet

SETS = sorted(path.parent for path in RESULTS.glob("*/suite.json"))
MADE = sorted((ROOT / "tests/golden/report").iterdir())
"""Sets built by hand: with GPUs, repetitions, and rows of every ending."""
CODE = sorted((ROOT / "tests/recount").glob("*.py"))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Callable[[Path], Path]:
    """Write the report of a set anew, once; return its folder."""

    @functools.cache
    def write(folder: Path) -> Path:
        target = tmp_path_factory.mktemp("sets") / folder.name
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns("report.*", "*.md", "*.png"))
        write_report(*load_all(target), target)
        return target

    return write


def entries(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


# ---- reports and pages, as they are ----


@pytest.mark.parametrize("folder", [*SETS, *MADE], ids=lambda p: p.name)
def test_the_numbers_of_a_report_are_what_its_raw_results_say(folder, written):
    assert list(faults(entries(written(folder)), ResultSet(folder))) == []


def test_the_two_tables_of_students_t_agree():
    """No set has every number of degrees of freedom."""
    assert all(floor.student(n) == pytest.approx(noise.student(n)) for n in range(1, 100))


def said(path: Path) -> Any:
    """What a published file says: the cells of a CSV, the text of a page without its layout."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        return list(csv.reader(io.StringIO(text)))
    return re.sub(r"<(style|script|svg)\b.*?</\1>|<[^>]*>", "", text, flags=re.S).split()


@pytest.mark.parametrize("folder", SETS, ids=lambda p: p.name)
def test_a_published_report_is_what_the_code_makes_of_its_raw_results(folder, written):
    published = sorted({*folder.glob("*.md"), *folder.glob("report.*")} - {*folder.glob("*.png")})
    assert {"report.md", "report.csv", "report.html", "report.json"} <= {p.name for p in published}
    for path in published:
        again = written(folder) / path.name
        if path.suffix == ".json":
            assert list(faults(entries(folder), ResultSet(folder))) == []
        elif path.suffix == ".csv":
            lines = zip(said(path), said(again), strict=True)
            assert not any(any(map(unlike, *line)) for line in lines), path
        else:
            assert said(path) == said(again), path


def unlike(ours: str, theirs: str) -> bool:
    """Return whether two cells differ by more than a last bit."""
    try:
        return ours != theirs and differs(float(ours), float(theirs))
    except ValueError:
        return ours != theirs


# ---- a number that is wrong ----


def bent(value: Any) -> Any:
    """A value next to this one, of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {**value, "more": 1}
    if isinstance(value, list):
        return [*map(bent, value[:1]), *value[1:]] if value else [1]
    return (1.001 * value + 1) if isinstance(value, int | float) else ("" if value else "one")


def places(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each number of a report.json: what it is of, and the dictionary and key that hold it."""
    for entry in data["unfinished"]:
        yield from (("unfinished", entry, name) for name in UNFINISHED if name in entry)
    for group in data["groups"]:
        yield from (("group", group, name) for name in GROUP)
        for row in group["rows"]:
            yield from (("row", row, name) for name in RAW)
            for part in OF_A_ROW:
                yield from ((part, row[part], name) for name in row.get(part, {}))


def out_of_memory(data: dict[str, Any]) -> None:
    data.update(status="host_oom", reason="no memory", way_out="less", phase="steady")
    data.update(peak_so_far_bytes=1 << 20)
    data["spec"].update(world=2)


def predicted(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda data: None) -> None:
    """Change each run that is ok, and give each run one prediction, with what a GPU's allocator
    reserves."""
    prediction = json.loads(min(SETS[0].glob("runs/*/prediction.json")).read_text())
    prediction["reserved"] = prediction["reserved_expandable"] = 3 << 30
    for path in [*folder.glob("runs/*/result.json")]:
        data = json.loads(path.read_text())
        if data["status"] == "ok":
            change(data)
            path.write_text(json.dumps(data))
        path.with_name("prediction.json").write_text(json.dumps(prediction))
        path.parent.rename(path.parents[1] / f"row-{load(path).spec.key}")


@pytest.fixture(scope="module")
def every(tmp_path_factory, written) -> list[tuple[dict[str, Any], ResultSet]]:
    """Each set's report.json and raw results, and two sets with endings that no other has."""
    folders = [*SETS, *MADE]
    for source, more in ((MADE[0], [out_of_memory]), (MADE[-1], [])):
        folders.append(tmp_path_factory.mktemp("changed") / source.name)
        shutil.copytree(source, folders[-1])
        predicted(folders[-1], *more)
    return [(entries(written(folder)), ResultSet(folder)) for folder in folders]


GROUP = ("device", "meter", "reference", "answers", "fastest_that_fits", "noise_floor")
WRONG = {
    *(("group", name) for name in GROUP),
    *(("row", name) for name in RAW),
    *(("unfinished", name) for name in UNFINISHED),
    *((part, name) for part, rules in OF_A_ROW.items() for name in rules),
    ("predicted", "parts"),
}


@pytest.mark.parametrize(("part", "name"), sorted(WRONG))
def test_a_wrong_number_is_found(part, name, every):
    """In the first set that has the number."""
    for data, results in every:
        found = [(at, key) for of, at, key in places(data) if (of, key) == (part, name)]
        at, key = next((f for f in found if f[0][f[1]] not in (None, "", [])), ({}, ""))
        if at:
            before, at[key] = at[key], wrong(name, at[key])
            seen = any(f", {name}: " in fault for fault in faults(data, results))
            at[key] = before
            assert seen
            return
    raise AssertionError("no set has this number")


def wrong(name: str, value: Any) -> Any:
    if name == "answers":
        return [{**value[0], "row": value[1]["row"]}, *value[1:]]
    if name == "fastest_that_fits":
        return [{**value[0], "row": "none"}, *value[1:]]
    if name == "noise_floor":
        return {**value, "fraction": 1.001 * value["fraction"]}
    if name == "parts":
        return value[1:]
    return bent(value)


# ---- no code is shared ----


def outside(text: str) -> set[str]:
    """The modules that a source imports, without those of the recount."""
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
