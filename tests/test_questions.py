"""docs/how-to/questions.md: each question has a command and a part of its output.

The guard's line is printed again. One number of the others is predicted again, of another question
with each change of the predictor (of all: ``QUESTIONS=all``).
"""

from __future__ import annotations

import os
import random
import shlex
from typing import NamedTuple

import pytest

from harness import cli
from harness.planner import pool
from tests.made.pages import BLOCK, QUESTIONS

GUARD = 9
"""The question whose whole output is one prediction. Counted from 1."""
DRAWN = 1
"""Of the others: a prediction of a video model is some fifteen seconds of a core."""
LORA = "single+bf16_pure+lora:rank="


def shown(page: str) -> list[tuple[str, str]]:
    """(command, output) of each block, as the page has them."""
    return [(match[1], match[2].strip("\n")) for match in BLOCK.finditer(page)]


class Edge(NamedTuple):
    """One prediction behind an answer: what is asked, and the words in front of its GiB."""

    words: str
    told: str


EDGES = {
    1: Edge(f"--recipes {LORA}16+checkpoint", "tight"),
    2: Edge("--recipes fsdp2+bf16+checkpoint", "videos/s,"),
    3: Edge(
        "--recipes zero3+bf16+lora:rank=16+checkpoint",
        "Least memory: zero3+bf16+lora:rank=16+checkpoint,",
    ),
    4: Edge("--recipes zero2_offload+bf16+checkpoint", "videos/s,"),
    5: Edge(f"--recipes {LORA}1+checkpoint+adam8bit", "videos/s,"),
    6: Edge("--recipes single+bf16+checkpoint --global-batch 15", "micro batch 15 may fit:"),
    7: Edge(f"--recipes {LORA}16 --also T5-XXL:nf4", "images/s,"),
    8: Edge(f"--recipes {LORA}128", "images/s,"),
    10: Edge("--recipes single+bf16", "From single+bf16: no, needs"),
}
"""Question -> what decides it."""
WORDS = ("fits", "tight", "host", "no")
"""Of a row: whether it fits."""


def test_every_question_has_its_command_and_its_output():
    page = QUESTIONS.read_text()
    blocks = shown(page)
    assert page.count("\n## ") == 10 == len(blocks) and all(output for _, output in blocks)
    assert {*EDGES, GUARD} == set(range(1, 11)) and len(page.splitlines()) <= 150


def test_the_page_shows_what_is_printed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pool, "default_folder", lambda: tmp_path)
    command, output = shown(QUESTIONS.read_text())[GUARD - 1]
    assert cli.main(shlex.split(command)[1:]) in (0, 1)
    assert capsys.readouterr().out.strip() == output


def drawn() -> list[int]:
    """Questions, others with each change of the predictor."""
    if os.environ.get("QUESTIONS") == "all":
        return list(EDGES)
    return sorted(random.Random(pool.code()).sample(list(EDGES), DRAWN))


@pytest.mark.thorough
@pytest.mark.parametrize("number", drawn())
def test_what_decides_an_answer_is_predicted_so_now(number, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pool, "default_folder", lambda: tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    command, output = shown(QUESTIONS.read_text())[number - 1]
    start = command.partition(" --recipes ")[0]
    cli.main([*shlex.split(start)[1:], *shlex.split(EDGES[number].words)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (need,) = {line[i + 1] for line in lines for i in (0, 1) if line[i : i + 1] and line[i] in WORDS
               and line[i + 1 : i + 2] and line[i + 1][0].isdigit()}  # fmt: skip
    told = output.replace("\n", " ").partition(EDGES[number].told)[2].split()
    assert abs(float(need) - float(told[0])) < 0.06, f"{QUESTIONS.name}, question {number}"
