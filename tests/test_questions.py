"""docs/questions.md: each question has a command and what it prints; two are asked again."""

from __future__ import annotations

import pytest

from tests.made.questions import PAGE, printed, remade, shown

CHEAP = (8, 10)
"""Those whose answers take the fewest predictions, counted from 1."""


def test_every_question_has_its_command_and_its_output():
    page = PAGE.read_text()
    blocks = shown(page)
    assert page.count("\n## ") == len(blocks) >= 11
    assert [command for command, output in blocks if not output] == []
    wide = [line for _, output in blocks for line in output.splitlines() if len(line) > 80]
    assert not wide, wide[0]


@pytest.mark.parametrize("number", CHEAP)
def test_the_page_shows_what_is_printed(number):
    command, output = shown(PAGE.read_text())[number - 1]
    assert printed(command) == output


def test_an_output_that_was_changed_by_hand_is_made_anew(monkeypatch):
    """The control: what stands on the page does not come from the page."""
    monkeypatch.setattr("tests.made.questions.printed", lambda command: f"asked: {command[2:8]}")
    page = "# P\n\n## One\n\n```\n./run.sh plan --gpu L4\n\nby hand\n```\n"
    assert shown(remade(page, set())) == [("./run.sh plan --gpu L4", "asked: run.sh")]
    assert remade(page, {2}) == page
