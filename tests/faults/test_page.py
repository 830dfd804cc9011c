"""docs/faults.md names every fault test, each that it names is there, and "by hand" is said of
those that ``./run.sh test`` leaves out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from harness import ROOT

PAGE = ROOT / "docs" / "faults.md"
TESTS = ROOT / "tests"
OWN = Path(__file__).name


def named(text: str) -> dict[str, bool]:
    """Test -> whether its line says that it is by hand."""
    lines = re.findall(r"^\| (.+?) \| `(\S+?\.py::\w+)` \|$", text, re.M)
    return {test: "(by hand)" in promise for promise, test in lines}


def those_of(path: Path) -> dict[str, bool]:
    """Tests of a file, as the page names them -> whether they run only when asked for."""
    text = path.read_text()
    by_hand = "\npytestmark = pytest.mark.faults\n" in text
    found = (n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef))
    return {
        f"{path.relative_to(TESTS)}::{name}": by_hand for name in found if name.startswith("test_")
    }


def wrong(text: str) -> list[str]:
    """What the page says that is not so, or does not say."""
    told, there = named(text), {}
    for path in (TESTS / "faults").glob("test_*.py"):
        there |= those_of(path) if path.name != OWN else {}
    faults = [f"{test} is not told of" for test in there if test not in told]
    for test, by_hand in told.items():
        file = TESTS / test.partition("::")[0]
        known = those_of(file) if file.exists() else {}
        if test not in known:
            faults.append(f"{test} is not there")
        elif known[test] != by_hand:
            faults.append(f"{test} is {'' if known[test] else 'not '}by hand")
    return faults


def test_the_page_tells_of_every_fault_test_and_of_none_that_is_not_there():
    text = PAGE.read_text()
    assert len(named(text)) > 60 and wrong(text) == []
    assert len(re.findall(r"^\| .*::", text, re.M)) == len(named(text)), "each line is read"
    assert text.count("Not promised: ") >= 5


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("test_a_lost_network_is_said", "test_a_lost_network_was_said", "is not there"),
        ("| two set-ups at once follow one another | `", "| two | ", "is not told of"),
        ("(SIGSTOP) runs into the deadline (by hand)", "(SIGSTOP)", "is by hand"),
        ("| `train --steps 20` takes 20 steps", "| steps (by hand)", "is not by hand"),
    ],
)
def test_a_page_that_is_not_so_is_noticed(old, new, said):
    text = PAGE.read_text()
    assert old in text and any(said in fault for fault in wrong(text.replace(old, new)))
