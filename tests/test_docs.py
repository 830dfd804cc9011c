"""Pages that are generated from code and from published results.

``PYTHONPATH=. python tests/test_docs.py`` writes the published reports, their tables on pages, and
the generated parts of pages.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from harness import cli
from harness.result import load_all
from harness.subjects.library import families as library
from tests.made import pages, reference

ROOT = Path(__file__).resolve().parent.parent
DOCS, README = ROOT / "docs", ROOT / "README.md"
RESULTS, FLUX = DOCS / "results", DOCS / "tutorial/flux-lora-24gb.md"
CLAIMS, MEASURED = DOCS / "reference/claims.md", DOCS / "reference/results.md"


@pytest.mark.parametrize("page", reference.GENERATED)
def test_the_generated_parts_of_a_page_are_what_the_code_says(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- made: (\w+) -->", text)) == set(reference.GENERATED[page])
    assert text == reference.filled(page)
    assert "|  |" not in text


def test_every_module_says_what_it_is():
    modules = [p for name in reference.FOLDERS for p in (ROOT / name).rglob("*.py")]
    assert len(modules) > 200 and [str(p) for p in modules if not reference.sentence(p)] == []


def test_the_claims_page_is_the_published_story():
    assert CLAIMS.read_text() == (RESULTS / "cpu-2-cores-claims/claims.md").read_text()


def options(command: str) -> dict[str, str]:
    """The options of a command and their values, as it is written."""
    return dict(re.findall(r"--([\w-]+) (\S+)", command))


def test_recorded_results_were_made_as_the_pages_say():
    shown = {
        "cpu-2-cores": re.search(r"by `(\./run\.sh [^`]+)`", README.read_text())[1],
        "cpu-2-cores-ladder": re.search(r"By `(\./run\.sh [^`]+)`", MEASURED.read_text())[1],
    }
    for name, command in shown.items():
        results, _ = load_all(RESULTS / name)
        settings = {k: v for k, v in options(command).items() if k not in ("suite", "recipes")}
        assert {"steps", "warmup"} <= set(settings)
        for result in results:
            for option, value in settings.items():
                assert str(getattr(result.spec, option.replace("-", "_"))) == value, option


def test_the_stated_noise_floor_is_that_of_the_recorded_default_suite():
    text = (DOCS / "explanation" / "noise-and-parity.md").read_text()
    said = re.search(r"\[it was ([\d.]+) %\]\(\.\./(results/[\w-]+)/report\.md\)", text)
    report = json.loads((DOCS / said[2] / "report.json").read_text())
    assert round(100 * report["groups"][0]["noise_floor"]["fraction"], 1) == float(said[1])


def test_recorded_commands_name_no_folder_of_a_machine():
    """They are to be pasted anywhere."""
    commands = [r.command for path in RESULTS.iterdir() if path.is_dir() for r in load_all(path)[0]]
    words = {word for line in commands for word in line.split() if word.startswith("/")}
    assert len(commands) > 100 and words <= {"/dev/null"}


def test_every_room_is_told_of():
    tree = (DOCS / "adding/README.md").read_text().split("```")[1]
    top = {p.parent.name for name in reference.FOLDERS for p in (ROOT / name).glob("*/__init__.py")}
    assert {name for name in top if f" {name}/" not in tree} == set()
    modules = {p.stem for p in (ROOT / "harness").glob("*.py") if not p.stem.startswith("__")}
    assert {name for name in modules if f" {name} " not in tree} == set()


def transcript(page: Path) -> str:
    """The plan that a page shows."""
    return re.search(r"^```\n(\./run\.sh plan .*?)^```", page.read_text(), re.S | re.M)[1]


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/questions-fit.md"])
def test_a_page_shows_an_excerpt_of_the_tutorial_s_plan(page):
    """It is held to the predictor by test_questions.py."""
    shown, full = transcript(ROOT / page), iter(transcript(FLUX).splitlines())
    assert all(line in full for line in shown.splitlines() if line != " ...")


def test_the_tutorial_on_sharding_shows_the_plan_of_the_how_to():
    shown = (DOCS / "tutorial/dit-xl-8-gpus.md").read_text().split("```")[1].splitlines()
    assert len(shown) > 9 and set(shown) <= set((DOCS / "how-to/plan.md").read_text().splitlines())


def test_the_tutorial_shows_an_excerpt_of_the_published_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shutil.copytree(RESULTS / "cpu-2-cores", tmp_path / "set")
    assert cli.main(["report", str(tmp_path / "set")]) == 0
    printed = iter([line.rstrip() for line in capsys.readouterr().out.splitlines()])
    page = (DOCS / "tutorial/first-comparison.md").read_text()
    shown = re.search(r"^```\n\./run\.sh report [^\n]+\n\n(.*?)^```", page, re.S | re.M)[1]
    lines = [line for line in shown.splitlines() if line.strip() not in ("...", "")]
    assert len(lines) > 8 and all(line in printed for line in lines)


def test_as_many_public_models_as_there_are():
    (said,) = re.findall(r"(\d+) public models", README.read_text())
    assert int(said) == len(library.table())


if __name__ == "__main__":
    pages.main()
    reference.written()
