"""docs/questions.md: each question has a command and what it prints; two are asked again."""

from __future__ import annotations

import pytest

from tests.made.questions import PAGE, printed, remade, shown

CHEAP = (10, 12)
"""Those whose answers take the fewest predictions, counted from 1."""


def test_every_question_has_its_command_and_its_output():
    page = PAGE.read_text()
    blocks = shown(page)
    assert page.count("\n## ") == 11 <= len(blocks)
    unasked = [n for n, (_, output) in enumerate(blocks, 1) if not output]
    assert unasked == [], "python -m tests.made.questions, and their numbers"
    folded = [o for command, o in blocks if not {"--check", "--explain"} & set(command.split())]
    wide = [line for output in folded for line in output.splitlines() if len(line) > 80]
    assert not wide, wide[0]


@pytest.mark.parametrize("number", CHEAP)
def test_the_page_shows_what_is_printed(number):
    command, output = shown(PAGE.read_text())[number - 1]
    assert printed(command) == output


def test_an_output_comes_from_its_command_alone():
    """The control: what stands on the page does not come from the page."""
    page = "# P\n\n## One\n\n```\n./run.sh plan --gpu L4\n\nby hand\n```\n"
    made = remade(page, {"./run.sh plan --gpu L4": "asked"})
    assert shown(made) == [("./run.sh plan --gpu L4", "asked")] and "by hand" not in made
    assert remade(page, {"./run.sh plan --gpu L40S": "asked"}) == page
