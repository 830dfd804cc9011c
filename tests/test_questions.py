"""Plans that pages show are what the command prints, from recorded predictions alone."""

from __future__ import annotations

import re
import shlex

import pytest

from docs.make.parts import BLOCK
from harness import ROOT, cli
from harness.planner import pool

RECORDED = "./run.sh plan --model flux-dev --gpu RTX-4090"
FLUX = ROOT / "docs/tutorial/flux-lora-24gb.md"
SHOWN = [ROOT / "README.md", FLUX]


def plain(output: str) -> str:
    """An output with its lines joined."""
    return " ".join(output.split())


def shown(text: str) -> list[tuple[str, str]]:
    """(command, output) of each block of a page."""
    return [(match[1], match[2].strip("\n")) for match in BLOCK.finditer(text)]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(command, lines shown below it) of each block of a page that starts with a command."""
    blocks = re.findall(r"^```(?:sh)?\n(\./run\.sh [^\n]+)\n(.*?)^```", text, re.S | re.M)
    lines = [(command, map(plain, output.splitlines())) for command, output in blocks]
    return [(command, [one for one in shown if one not in ("", "...")]) for command, shown in lines]


TUTORIAL = commands(FLUX.read_text(encoding="utf-8"))
SLOW = pytest.mark.thorough  # the passes of encoders are traced


@pytest.mark.parametrize(
    ("command", "lines"),
    [pytest.param(*one, marks=[SLOW] if "--phases" in one[0] else []) for one in TUTORIAL],
    ids=["plan", "phases", "export", "check"],
)
def test_each_command_of_the_flux_tutorial_ends_well(command, lines, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pool, "ROOT", tmp_path)  # of an empty folder of predictions
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command)[1:]) == 0
    printed = [plain(line) for line in capsys.readouterr().out.replace("\u00b1", "+-").splitlines()]
    assert [line for line in lines if line not in printed] == []
    if "--phases" in command:
        (told,) = re.findall("`(by phase: .*?)`", FLUX.read_text(encoding="utf-8"))
        assert told in " ".join(printed)
    if "--out" in command:
        assert (tmp_path / "take_home/trainers.md").is_file()


def test_the_flux_tutorial_takes_one_recipe_home():
    recipes = [shlex.split(command) for command, _ in TUTORIAL]
    named = {word for words in recipes for word in words if word.startswith("single+")}
    assert len(named) == 1 and f"Adapters: {named.pop()}" in FLUX.read_text(encoding="utf-8")


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
