"""Pages that are generated from code and from published results: ``python -m docs.make.parts``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.make import parts
from harness.result import load_all
from harness.subjects.library import families as library
from harness.suite.file import load_suite

ROOT = Path(__file__).resolve().parent.parent
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


def transcript(page: Path) -> str:
    """The plan that a page shows."""
    return re.search(r"^```\n(\./run\.sh plan .*?)^```", page.read_text(), re.S | re.M)[1]


def test_readme_shows_an_excerpt_of_the_tutorial_s_plan():
    """It is held to the predictor by test_questions.py."""
    shown, full = transcript(README), iter(transcript(FLUX).splitlines())
    assert all(line in full for line in shown.splitlines() if line != " ...")


def test_the_tutorial_on_sharding_shows_the_plan_of_the_how_to():
    shown = (DOCS / "tutorial/dit-xl-8-gpus.md").read_text().split("```")[1].splitlines()
    assert len(shown) > 9 and set(shown) <= set((DOCS / "how-to/plan.md").read_text().splitlines())


def test_as_many_public_models_as_there_are():
    (said,) = re.findall(r"(\d+) public models", README.read_text())
    assert int(said) == len(library.table())
