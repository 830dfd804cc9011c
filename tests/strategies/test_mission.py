"""The mission's rows stay, by name (``tests.made.mission``): other files of tests run each."""

from __future__ import annotations

import pytest

from harness import ROOT
from tests.made import mission
from tests.made.recipes import DRAWN_HERE
from tests.made.stubs import LOST


def test_each_that_trains_or_draws_is_in_the_lists_of_what_is_run():
    """test_catalog runs mission.TRAINED itself."""
    assert set(mission.STOOD_IN.values()) <= {text for text, *_ in LOST.values()}
    assert set(mission.DRAWN.values()) <= set(DRAWN_HERE)
    files = ("worker/test_runs.py", "strategies/test_launched.py")
    lists = "".join((ROOT / "tests" / file).read_text(encoding="utf-8") for file in files)
    assert [text for text in mission.LAUNCHED.values() if f'"{text}"' not in lists] == []


@pytest.mark.parametrize("name", mission.TESTS)
def test_a_file_of_tests_runs_it(name):
    assert "def test_" in (ROOT / "tests" / mission.TESTS[name]).read_text()
