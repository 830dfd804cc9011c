"""Size is a feature: the budget of docs/architecture.md.

A row of its table has a ceiling, which this test holds, and a goal.
"""

from __future__ import annotations

import re

import pytest

from harness import ROOT

TABLE = ROOT / "docs/architecture.md"
ROW = re.compile(r"^\| `([\w/*]+)` \| ([\d,]+) \| ([\d,]+) \|", re.M)
BUDGET = {
    name: int(ceiling.replace(",", ""))
    for name, ceiling, _ in ROW.findall(TABLE.read_text(encoding="utf-8"))
}
"""Folder, or the modules of a folder (``harness/*``) -> the most lines of Python."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [page for page in (ROOT / "docs").rglob("*.md") if "results" not in page.parts]


@pytest.mark.parametrize("name", BUDGET)
def test_a_part_is_within_its_budget(name):
    files = ROOT.glob(f"{name}.py") if name.endswith("*") else (ROOT / name).rglob("*.py")
    lines = [len(file.read_text(encoding="utf-8").splitlines()) for file in files]
    assert 0 < sum(lines) <= BUDGET[name], "make it smaller, or say in the table why it grows"


def test_every_package_has_a_budget():
    packages = {str(p.parent.relative_to(ROOT)) for p in ROOT.glob("harness/*/__init__.py")}
    assert packages <= BUDGET.keys() and {"harness/*", "strategies", "tests"} <= BUDGET.keys()


def test_the_documentation_can_be_read_in_an_evening():
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in PAGES)
    size = sum(path.stat().st_size for path in (ROOT / "docs").rglob("*") if path.is_file())
    assert len(PAGES) <= 45 and words <= 35_000 and size <= 4 * 2**20
