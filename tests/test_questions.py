"""Plans that pages show are what the command prints, from recorded predictions alone."""

from __future__ import annotations

import shlex

import pytest

from harness import ROOT, cli
from harness.planner import pool
from tests.made.pages import BLOCK

RECORDED = "./run.sh plan --model flux-dev --gpu RTX-4090"
SHOWN = [ROOT / name for name in ("README.md", "docs/tutorial/flux-lora-24gb.md")]


def plain(output: str) -> str:
    """An output with its lines joined."""
    return " ".join(output.split())


def shown(text: str) -> list[tuple[str, str]]:
    """(command, output) of each block of a page."""
    return [(match[1], match[2].strip("\n")) for match in BLOCK.finditer(text)]


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
