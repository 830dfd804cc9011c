"""Parts of pages that code generates (``python -m docs.make.parts``), and plans that pages show."""

from __future__ import annotations

import re
import shlex

import pytest

from docs.make import parts
from harness import ROOT, cli
from harness.planner import pool
from harness.result import load_all
from harness.subjects.library import families as library
from harness.suite.file import load_suite

DOCS, README = ROOT / "docs", ROOT / "README.md"
FLUX = DOCS / "tutorial/flux-lora-24gb.md"


@pytest.mark.parametrize("page", parts.GENERATED)
def test_the_generated_parts_of_a_page_are_what_the_code_says(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- made: (\w+) -->", text)) == set(parts.GENERATED[page])
    assert text == parts.filled(page)
    assert "|  |" not in text


def test_the_published_report_is_made_of_its_results():
    assert parts.REPORT.read_text(encoding="utf-8") == parts.report()


def test_the_published_results_were_made_by_readme_s_first_command():
    suite = load_suite("default", "cpu")
    results, skipped = load_all(parts.PUBLISHED)
    assert not skipped and {r.spec.recipe for r in results} == {r.recipe for r in suite.rows}
    assert {r.spec.model for r in results} == {suite.settings["model"]}


def test_the_stated_noise_floor_is_that_of_the_published_results():
    text = (DOCS / "explanation" / "noise-and-fairness.md").read_text()
    said = re.search(r"\[it was ([\d.]+) %\]\(\.\./results/[\w-]+/report\.md\)", text)[1]
    assert f"Noise floor {said} %" in parts.REPORT.read_text(encoding="utf-8")


def test_recorded_commands_name_no_folder_of_a_machine():
    """They are to be pasted anywhere."""
    words = {w for row in load_all(parts.PUBLISHED)[0] for w in row.command.split()}
    assert words and {word for word in words if word.startswith("/")} <= {"/dev/null"}


def test_the_tutorial_on_sharding_shows_the_plan_of_the_how_to():
    shown = (DOCS / "tutorial/dit-xl-8-gpus.md").read_text().split("```")[1].splitlines()
    assert len(shown) > 9 and set(shown) <= set((DOCS / "how-to/plan.md").read_text().splitlines())


def test_as_many_public_models_as_there_are():
    (said,) = re.findall(r"(\d+) public models", README.read_text())
    assert int(said) == len(library.table())


# ---- plans that pages show ----


def plain(output: str) -> str:
    """An output with its lines joined."""
    return " ".join(output.split())


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(command, lines shown below it) of each block of a page that starts with a command."""
    blocks = re.findall(r"^```(?:sh)?\n(\./run\.sh [^\n]+)\n(.*?)^```", text, re.S | re.M)
    lines = [(command, map(plain, output.splitlines())) for command, output in blocks]
    return [(command, [one for one in shown if one not in ("", "...")]) for command, shown in lines]


TUTORIAL = commands(FLUX.read_text(encoding="utf-8"))
RECORDED = TUTORIAL[0][0]
SHOWN = [*TUTORIAL, *(one for one in commands(README.read_text("utf-8")) if one[0] == RECORDED)]


@pytest.mark.parametrize(
    ("command", "lines"),
    # The passes of encoders are traced.
    [pytest.param(*one, marks=[pytest.mark.thorough] * ("--phases" in one[0])) for one in SHOWN],
    ids=["plan", "phases", "export", "check", "readme"],
)
def test_each_command_that_pages_show_ends_well(command, lines, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pool, "ROOT", tmp_path)  # of an empty folder of predictions
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    if command == RECORDED:
        monkeypatch.setattr(pool, "Worker", lambda *given: pytest.fail("a process was started"))
    assert cli.main(shlex.split(command)[1:]) == 0
    printed = [plain(line) for line in capsys.readouterr().out.replace("\u00b1", "+-").splitlines()]
    assert [line for line in lines if line not in printed] == [] and (lines or command != RECORDED)
    if "--phases" in command:
        (told,) = re.findall("`(by phase: .*?)`", FLUX.read_text(encoding="utf-8"))
        assert told in " ".join(printed)
    if "--out" in command:
        assert (tmp_path / "take_home/trainers.md").is_file()


def test_the_flux_tutorial_takes_one_recipe_home():
    recipes = [shlex.split(command) for command, _ in TUTORIAL]
    named = {word for words in recipes for word in words if word.startswith("single+")}
    assert len(named) == 1 and f"Adapters: {named.pop()}" in FLUX.read_text(encoding="utf-8")
