"""The pages of questions: each question as it was asked, a command and a part of its output.

Outputs that need no prediction, and the guard's line, are printed again. One number of the others
is predicted again, of another question each day (of all: ``QUESTIONS=all``).
"""

from __future__ import annotations

import os
import random
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from harness import ROOT, cli
from harness.planner import pool
from tests.made.pages import BLOCK, QUESTIONS

WHOLE = (4, 11, 15)
"""Questions whose first output is printed whole: a refusal, a guard, a message."""
DRAWN = 1
"""Of the others: a prediction of a video model is some fifteen seconds of a core."""
MOST = 150
"""Lines of a page."""
LORA = "single+bf16_pure+lora:rank="


def texts() -> dict[int, str]:
    """The text of each question by its number."""
    page = "".join(page.read_text() for page in QUESTIONS)
    parts = re.split(r"^## (\d+)\. |^# .*", page, flags=re.M)[1:]
    return {
        int(number): text for number, text in zip(parts[::2], parts[1::2], strict=True) if number
    }


def shown(text: str) -> list[tuple[str, str]]:
    """(command, output) of each block of a question."""
    return [(match[1], match[2].strip("\n")) for match in BLOCK.finditer(text)]


def plain(output: str) -> str:
    """An output with its lines joined."""
    return " ".join(output.split())


def files(text: str, folder: Path) -> None:
    """Write the files that a question shows: "`job.yaml`:" and a block."""
    for name, content in re.findall(r"`([\w.]+)`:\n\n```\w*\n(.*?)^```", text, re.S | re.M):
        (folder / name).write_text(content)


class Edge(NamedTuple):
    """One prediction behind an answer: what is asked, and the words in front of its GiB."""

    words: str
    told: str


EDGES = {
    1: Edge(f"--recipes {LORA}16+checkpoint", "tight"),
    2: Edge("--recipes fsdp2+bf16+checkpoint", "videos/s,"),
    3: Edge("--recipes single+bf16+checkpoint --global-batch 15", "micro batch 15 may fit:"),
    5: Edge("--recipes single+bf16", "From single+bf16: no, needs"),
    6: Edge(f"--recipes {LORA}1+checkpoint+adam8bit", "videos/s,"),
    7: Edge(
        "--recipes zero3+bf16+lora:rank=16+checkpoint",
        "Least memory: zero3+bf16+lora:rank=16+checkpoint,",
    ),
    8: Edge(f"--recipes {LORA}16 --also T5-XXL:nf4", "images/s,"),
    9: Edge("--recipes single+bf16_pure+adafactor", "Least memory: single+bf16_pure+adafactor,"),
    10: Edge(f"--recipes {LORA}128", "images/s,"),
    12: Edge(
        f"--recipes {LORA}16+checkpoint --phases load:fp32 validate:encoders",
        "images/s,",
    ),
    14: Edge("--recipes zero2_offload+bf16+checkpoint", "videos/s,"),
}
"""Question -> what decides it."""
WORDS = ("fits", "tight", "host", "no")
"""Of a row: whether it fits."""


def test_every_question_is_quoted_and_has_its_command_and_output():
    found = texts()
    assert [*found] == list(range(1, 16)) and {*EDGES, *WHOLE} <= {*found}
    for text in found.values():
        blocks = shown(text)
        assert re.search(r'^> ".+" \(\[[^\]]+\]\(https://github\.com/\S+\)\)$', text, re.M)
        assert blocks and all(output for _, output in blocks)
    assert all(len(page.read_text().splitlines()) <= MOST for page in QUESTIONS)


@pytest.mark.parametrize("number", WHOLE)
def test_the_page_shows_what_is_printed(number, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pool, "default_folder", lambda: tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    text = texts()[number]
    files(text, tmp_path)
    command, output = shown(text)[0]
    assert cli.main(shlex.split(command)[1:]) in (0, 1, 2)
    printed = capsys.readouterr()
    said = printed.out.strip() or printed.err.strip()
    assert [line.rstrip() for line in said.splitlines()] == output.splitlines()


def drawn() -> list[int]:
    """Questions, others each day."""
    if os.environ.get("QUESTIONS") == "all":
        return list(EDGES)
    return sorted(random.Random(os.environ["TESTS_DAY"]).sample(list(EDGES), DRAWN))


@pytest.mark.thorough
@pytest.mark.parametrize("number", drawn())
def test_what_decides_an_answer_is_predicted_so_now(number, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pool, "default_folder", lambda: tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    told = EDGES[number].told
    command, output = next(pair for pair in shown(texts()[number]) if told in plain(pair[1]))
    start = command.partition(" --recipes ")[0]
    cli.main([*shlex.split(start)[1:], *shlex.split(EDGES[number].words)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (need,) = {line[i + 1] for line in lines for i in (0, 1) if line[i : i + 1] and line[i] in WORDS
               and line[i + 1 : i + 2] and line[i + 1][0].isdigit()}  # fmt: skip
    shows = plain(output).partition(told)[2].split()
    assert abs(float(need) - float(shows[0])) < 0.06, f"question {number}"


RECORDED = "./run.sh plan --model flux-dev --gpu RTX-4090"
SHOWN = [ROOT / name for name in ("README.md", "docs/tutorial/flux-lora-24gb.md", QUESTIONS[0])]


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.name)
def test_a_recorded_plan_is_what_pages_show(page, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pool, "ROOT", tmp_path)  # of an empty folder of predictions
    monkeypatch.setattr(pool, "Run", lambda *given: pytest.fail("a process was started"))
    monkeypatch.setenv("COLUMNS", "80")
    (output,) = (output for command, output in shown(page.read_text()) if command == RECORDED)
    assert cli.main(shlex.split(RECORDED)[1:]) == 0
    printed = [plain(line) for line in capsys.readouterr().out.replace("\u00b1", "+-").splitlines()]
    told = [line for line in map(plain, output.splitlines()) if line and line != "..."]
    assert told and [line for line in told if line not in printed] == []
