"""docs/how-to/questions.md: each question has a command and what it prints. One is asked again as
it stands; of the others a row, or the edge of what fits, is predicted anew: another one with each
change of the predictor, so that all are in time (all at once: ``QUESTIONS=all``)."""

from __future__ import annotations

import os
import random
import shlex
from typing import NamedTuple

import pytest

from harness import cli
from harness.planner import pool
from tests.made.questions import COLUMNS, PAGE, cleaned, remade, shown

ALONE = 12
"""The one that is asked as it stands, a guard's: one prediction. Counted from 1."""
DRAWN = 1
"""Of the others: a prediction of a video model is some fifteen seconds of a core."""
ADAPTED = "single+bf16_pure+lora:rank=16+checkpoint"


class Edge(NamedTuple):
    """One prediction behind an answer that took many: what is asked instead, and the words in front
    of the GiB that it needs."""

    words: str
    told: str


EDGES = {
    6: Edge(f"--recipes {ADAPTED}+block_swap:blocks=19", "19 blocks"),
    8: Edge("--recipes single+bf16+checkpoint --global-batch 14", "micro batch 14"),
    9: Edge(f"--recipes {ADAPTED} --frames 157", "480x832 of 157"),
    13: Edge("--recipes single+bf16", "From single+bf16: no, needs"),
}
"""Question -> what decides it."""
SEARCHED = {1: [ADAPTED, "single+bf16_pure+qlora:rank=16+checkpoint"]}
"""Recipes of the question that names none: those that its search predicts."""


def test_every_question_has_its_command_and_its_output():
    page = PAGE.read_text()
    blocks = shown(page)
    assert page.count("\n## ") == 11 <= len(blocks)
    unasked = [n for n, (_, output) in enumerate(blocks, 1) if not output]
    assert unasked == [], "python -m tests.made.questions, and their numbers"
    folded = [o for command, o in blocks if not {"--check", "--explain"} & set(command.split())]
    lines = [line for output in folded for line in output.splitlines()]
    wide = [line for line in lines if len(line.replace("+-", "\u00b1")) > 80]
    wide = [line for line in wide if "./run.sh export" not in line]  # a command is one line
    assert not wide, wide[0]


def test_the_page_shows_what_is_printed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pool, "default_folder", lambda: tmp_path)
    monkeypatch.setenv("COLUMNS", COLUMNS)
    command, output = shown(PAGE.read_text())[ALONE - 1]
    assert cli.main(shlex.split(command)[1:]) in (0, 1)
    assert cleaned(capsys.readouterr().out) == output


def drawn() -> list[int]:
    """Questions, others with each change of the predictor."""
    others = [n for n in range(1, 1 + len(shown(PAGE.read_text()))) if n != ALONE]
    if os.environ.get("QUESTIONS") == "all":
        return others
    return sorted(random.Random(pool.code()).sample(others, DRAWN))


WORDS = ("fits", "tight", "host", "no")
"""Of a row: whether it fits."""


def rows_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The cells of the rows that a plan prints, from the word on whether they fit."""
    cli.main(words)
    return cells(capsys.readouterr().out)


def cells(text: str) -> list[list[str]]:
    lines = [line.replace("\u00b1", "+-").split() for line in text.splitlines()]
    starts = [(line, word) for line in lines for word in WORDS if word in line[1:2]]
    return [line[line.index(word) :] for line, word in starts]


def within(some: list[str], all_of: list[str]) -> bool:
    """Whether these cells stand among those in the same order: a narrow page shows fewer."""
    rest = iter(all_of)
    return all(cell in rest for cell in some)


@pytest.mark.parametrize("number", drawn())
def test_what_decides_an_answer_is_predicted_so_now(number, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pool, "default_folder", lambda: tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    command, output = shown(PAGE.read_text())[number - 1]
    start, _, recipes = command.partition(" --recipes ")
    words = shlex.split(start)[1:]
    if number in EDGES:
        (row,) = rows_of([*words, *shlex.split(EDGES[number].words)], capsys)
        told = output.replace("\n", " ").partition(EDGES[number].told)[2].split()
        assert abs(float(row[1]) - float(told[0])) < 0.06, "python -m tests.made.questions"
        return
    named = [word for word in recipes.split(" --")[0].split() if word]
    recipe = random.Random(pool.code()).choice(named or SEARCHED[number])
    options = [part for rest in recipes.split(" --")[1:] for part in f"--{rest}".split()]
    (row,) = rows_of([*words, "--recipes", recipe, *options], capsys)
    assert any(within(shown_row, row) for shown_row in cells(output)), f"{recipe}: {row}"


def test_an_output_comes_from_its_command_alone():
    """The control: what stands on the page does not come from the page."""
    page = "# P\n\n## One\n\n```\n./run.sh plan --gpu L4\n\nby hand\n```\n"
    made = remade(page, {"./run.sh plan --gpu L4": "asked"})
    assert shown(made) == [("./run.sh plan --gpu L4", "asked")] and "by hand" not in made
    assert remade(page, {"./run.sh plan --gpu L40S": "asked"}) == page
