"""The numbers of each ranking are recounted from raw results; a fault in each is seen."""

from __future__ import annotations

import ast
import functools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import ROOT
from harness.report import write_report
from harness.report.figures import floor
from harness.result import load_all
from tests.recount import noise
from tests.recount.numbers import TEN, faults
from tests.recount.raw import ResultSet

RESULTS = ROOT / "docs" / "results"
SETS = sorted(path.parent for path in RESULTS.glob("*/suite.json"))
MADE = sorted((ROOT / "tests/golden/report").iterdir())
"""Sets built by hand: with GPUs, repetitions, and rows of every ending."""
EACH = [*SETS, *MADE]
CODE = sorted((ROOT / "tests/recount").glob("*.py"))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Callable[[Path], dict[str, Any]]:
    """Write the report of a set anew, once; return its report.json."""

    @functools.cache
    def write(folder: Path) -> dict[str, Any]:
        target = tmp_path_factory.mktemp("sets") / folder.name
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns("report.*"))
        write_report(*load_all(target), target)
        return json.loads((target / "report.json").read_text(encoding="utf-8"))

    return write


@pytest.mark.parametrize("folder", EACH, ids=lambda p: p.name)
def test_the_numbers_of_a_ranking_are_what_its_raw_results_say(folder, written):
    assert list(faults(written(folder), ResultSet(folder))) == []


def test_the_two_tables_of_students_t_agree():
    """No set has every number of degrees of freedom."""
    assert all(floor.student(n) == pytest.approx(noise.student(n)) for n in range(1, 100))


@pytest.mark.parametrize("name", TEN)
@pytest.mark.parametrize("folder", EACH, ids=lambda p: p.name)
def test_a_wrong_number_is_found(name, folder, written):
    data, part = json.loads(json.dumps(written(folder))), TEN[name][0]
    rows = [row for group in data["groups"] for row in group["rows"]]
    entry = next(row[part] for row in rows if row[part][name] is not None)
    value = entry[name]
    entry[name] = (not value) if isinstance(value, bool) else 1.001 * value + 1
    assert any(f", {name}: " in fault for fault in faults(data, ResultSet(folder)))


def test_a_row_that_is_missing_or_invented_is_found(written):
    data = json.loads(json.dumps(written(MADE[0])))
    gone = data["groups"][0]["rows"].pop()
    assert any("is missing" in fault for fault in faults(data, ResultSet(MADE[0])))
    data["groups"][0]["rows"].append({**gone, "command": "another"})
    assert any("no raw result" in fault for fault in faults(data, ResultSet(MADE[0])))


@pytest.mark.parametrize("path", CODE, ids=lambda p: p.name)
def test_the_recount_imports_the_standard_library_alone(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "." * node.level)
    outside = {name for name in found if name.split(".")[:2] != ["tests", "recount"]}
    assert {name.partition(".")[0] for name in outside} <= sys.stdlib_module_names
