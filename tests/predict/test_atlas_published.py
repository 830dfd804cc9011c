"""The published atlas against the present predictor: cells drawn over models, cards and counts
predicted anew, and its files against each other."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import random
import shlex

import pytest

from harness import ROOT
from harness.commands.atlas.cells import HEADS, TRAININGS
from harness.commands.atlas.files import write
from harness.commands.atlas.places import Place, predicted
from harness.commands.atlas.sizes import DOUBLINGS, larger
from harness.commands.planning.plan.asked import asked_for
from harness.commands.planning.plan.command import add_arguments as plan_arguments
from harness.commands.planning.plan.progress import PlanProgress
from harness.predict import pool, workers
from harness.predict.verdict import Fit
from harness.resolve import Resolved

FOLDER = ROOT / "docs/atlas"
CELLS = list(csv.DictReader((FOLDER / "atlas.csv").read_text(encoding="utf-8").splitlines()))


class Silent(PlanProgress):
    """Says nothing."""

    def __init__(self) -> None:
        self.names, self.ended = [], 0

    def begin(self, *given, **more) -> None: ...

    def done(self, *given) -> None: ...

    def end(self) -> None: ...


def sought_at(cell: dict[str, str]) -> bool:
    """Whether the next size that does not fit was sought there."""
    return cell["Fits"] != "no" and bool(cell["Too large"])


def sample() -> list[dict[str, str]]:
    """The cells, of each training one, of a model, a number of GPUs and a card: others with each
    change of the predictor, the same as long as it stays."""
    draw = random.Random(pool.code())
    of = {head: draw.choice(sorted({c[head] for c in CELLS})) for head in ("Model", "GPUs", "Card")}
    return [cell for cell in CELLS if of.items() <= cell.items()]


def around(cell: dict[str, str], fit: Fit) -> list[tuple[Resolved, bool]]:
    """The size that is too large for a cell and the one before it, and whether each fits."""
    sizes = list(larger(fit.resolved, DOUBLINGS)) if sought_at(cell) else []
    names = [size.name for size in sizes]
    at = names.index(cell["Too large"]) if cell["Too large"] in names else len(sizes)
    return [(sizes[n].row, n < at) for n in (at - 1, at) if 0 <= n < len(sizes)]


def test_published_cells_are_what_the_predictor_says_now(tmp_path, monkeypatch):
    """Of each training one: the fastest of all that a plan tries, those too that the atlas did not
    trace, all on that card; and traces of the size that is too large and the one before it."""
    monkeypatch.setattr(pool, "default_folder", lambda: tmp_path)
    cells, parser = sample(), argparse.ArgumentParser()
    assert [cell["Training"] for cell in cells] == list(TRAININGS)
    plan_arguments(parser)
    plain = cells[0]["Command"].partition(" --recipes ")[0]
    _, _, *words = shlex.split(plain)  # ./run.sh plan ...
    asked = asked_for(parser.parse_args(words))
    place = Place(model=cells[0]["Model"], card=cells[0]["Card"], asked=asked)
    ask = functools.partial(predicted, jobs=2, progress=Silent())
    with workers.standing():
        place.fits = ask([(place, row) for row in asked.resolved], "")
        found = [place.cell(training) for training in TRAININGS]
        sides = [x for cell, now in zip(cells, found, strict=True) for x in around(cell, now.fit)]
        traced = ask([(place, row) for row, _ in sides], "")
    for cell, now in zip(cells, found, strict=True):
        told = dict(
            zip(HEADS, dataclasses.replace(now, beyond=cell["Too large"]).texts, strict=True)
        )
        assert told == cell, "the predictor has changed: make docs/atlas again (docs/plan.md)"
    assert [fit.fits for fit in traced] == [fits for _, fits in sides], "the next size is another"


def test_its_files_are_those_of_its_csv(tmp_path):
    """Made of its CSV again, each file is the published one; no page of a model is left over."""
    write([list(cell.values()) for cell in CELLS], tmp_path)
    made, published = (
        {str(path.relative_to(folder)): path.read_text("utf-8") for path in folder.rglob("*.*")}
        for folder in (tmp_path, FOLDER)
    )
    assert sorted(made) == sorted(published)
    assert all(made[name] == published[name] for name in made), "./run.sh atlas --from its CSV"


@pytest.mark.parametrize("cell", CELLS[:: max(1, len(CELLS) // 40)], ids=lambda c: c["Command"])
def test_a_cell_s_word_follows_from_its_numbers(cell):
    need, has = float(cell["Needs GiB"]), float(cell["Has GiB"])
    assert (cell["Fits"] == "yes") == (need <= has) or abs(need - has) < 0.1
    assert f"--model {cell['Model']} --gpus {cell['GPUs']} " in cell["Command"]
    assert cell["Command"].endswith(f"--recipes {cell['Recipe']}")
    assert (cell["Too large"] == cell["Sample"]) == (cell["Fits"] == "no")


def test_the_next_size_is_sought_of_all_cells_on_as_many_gpus():
    of = {(cell["GPUs"], sought_at(cell)) for cell in CELLS if cell["Fits"] != "no"}
    assert len(of) == len({gpus for gpus, _ in of})
