"""The published atlas against the present predictor: its cheapest cells predicted anew, and the
three files against each other."""

from __future__ import annotations

import argparse
import csv
import shlex

import pytest

from harness import ROOT
from harness.commands.atlas.cells import HEADS, TRAININGS, cell_of
from harness.commands.planning.plan.asked import asked_for
from harness.commands.planning.plan.asking import Asking
from harness.commands.planning.plan.command import add_arguments as plan_arguments
from harness.commands.planning.plan.progress import PlanProgress
from harness.predict import pool
from harness.subjects.library import presets

FOLDER = ROOT / "docs/atlas"
CELLS = list(csv.DictReader((FOLDER / "atlas.csv").read_text(encoding="utf-8").splitlines()))
SMALLEST = min({c["Model"] for c in CELLS}, key=lambda m: presets.table()[m].parameters["built"])
SOUGHT = "Too large"


class Silent(PlanProgress):
    """Says nothing."""

    def __init__(self) -> None:
        self.names, self.ended = [], 0

    def begin(self, *given, **more) -> None: ...

    def done(self, *given) -> None: ...

    def end(self) -> None: ...


def sample(training: str) -> dict[str, str]:
    """The first cell of the smallest model on one GPU."""
    of = {"Model": SMALLEST, "Training": training, "GPUs": "1"}
    return next(cell for cell in CELLS if of.items() <= cell.items())


def test_published_cells_are_what_the_predictor_says_now(tmp_path, monkeypatch):
    """Of each training one, by its own command; both at once, so that libraries load once."""
    monkeypatch.setattr(pool, "default_folder", lambda: tmp_path)
    cells, parser = [sample(training) for training in TRAININGS], argparse.ArgumentParser()
    plan_arguments(parser)
    _, _, *words = shlex.split(cells[0]["Command"])  # ./run.sh plan ...
    asked = asked_for(parser.parse_args([*words, *(cell["Recipe"] for cell in cells[1:])]))
    fits = Asking(asked, 2, Silent()).fits(asked.resolved)
    for cell in cells:
        named = {"model": cell["Model"], "gpus": 1, "card": cell["Card"]}
        found = cell_of(fits, cell["Training"], named | {"card_bytes": asked.gpu.memory_bytes})
        now = dict(zip(HEADS, found.texts, strict=True))
        assert {k: v for k, v in now.items() if k != SOUGHT} == {
            k: v for k, v in cell.items() if k != SOUGHT
        }, "the predictor has changed: make docs/atlas again (docs/plan.md)"


def test_its_files_agree_and_say_what_they_cover():
    page, table = ((FOLDER / f"atlas.{kind}").read_text("utf-8") for kind in ("html", "md"))
    assert page.count("<tr class=") == len(CELLS) == len({c["Command"] + c["Training"] +
                                                          c["Card"] for c in CELLS})  # fmt: skip
    lines = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(lines) == 1 + len(CELLS)
    models = list(dict.fromkeys(cell["Model"] for cell in CELLS))
    for text in (page, table):
        assert f"{len(CELLS)} cells: {len(models)} models ({', '.join(models)})" in text
    for cell, line in zip(CELLS, lines[1:], strict=True):
        told = [part.strip() for part in line.strip("|").split("|")]
        assert told[0] == cell["Model"] and told[6] == cell["Needs GiB"]


@pytest.mark.parametrize("cell", CELLS[:: max(1, len(CELLS) // 40)], ids=lambda c: c["Command"])
def test_a_cell_s_word_follows_from_its_numbers(cell):
    need, has = float(cell["Needs GiB"]), float(cell["Has GiB"])
    assert (cell["Fits"] == "yes") == (need <= has) or abs(need - has) < 0.1
    assert f"--model {cell['Model']} --gpus {cell['GPUs']} " in cell["Command"]
    assert cell["Command"].endswith(f"--recipes {cell['Recipe']}")
    if cell["Fits"] == "no":
        assert cell["Too large"] in ("", cell["Sample"])
