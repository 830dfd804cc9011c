"""Which recipes an atlas traces, on made-up memory and time: those of its plans."""

from __future__ import annotations

import argparse

import pytest

from harness.planner.atlas.cells import TRAININGS, cells_at
from harness.planner.atlas.command import add_arguments, places_of
from harness.planner.explore import search
from harness.planner.overhead import preferred
from harness.planner.verdict import judge
from tests.made.lattices import predicted

CARDS = ("12GiB", "RTX-3090", "RTX-4090", "A100-80GB", "H100-80GB", "T4-16GB")


class Made:
    """An ``Ask`` of made-up predictions, and what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, str]] = []

    def __call__(self, pairs, why):
        kinds = [preferred(place.asked.gpu.capability) for place, _ in pairs]
        rows = [(str(row.recipe), row.spec.processes) for _, row in pairs]
        self.asked += [(*row, kind) for row, kind in zip(rows, kinds, strict=True)]
        return [judge(row, predicted(row, 1.0), place.asked.gpu) for place, row in pairs]


def places(*words: str, model: str = "flux-dev"):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return places_of(model, parser.parse_args([*words]))


@pytest.mark.parametrize("gpus", ["1", "4"])
def test_each_cell_is_the_answer_of_its_plan_which_asks_for_no_other_trace(gpus):
    ask = Made()
    cells = cells_at(places("--cards", *CARDS, "--gpus", gpus), ask)
    assert [cell.training for cell in cells] == [*TRAININGS] * len(CARDS)
    traced = set(ask.asked)
    for place in places("--cards", *CARDS, "--gpus", gpus):
        own = Made()
        _, proofs = search(
            place.asked.resolved,
            place.asked.gpu,
            lambda rows, own=own, place=place: own([(place, row) for row in rows], ""),
        )
        assert set(own.asked) <= traced
        found = {c.training: c for c in cells if c.card == place.card}
        for proof in proofs:
            cell = found["LoRA" if proof.adapters else "all weights"]
            told = proof.best or proof.nearest
            assert (cell.fit.label, cell.fit.verdict) == (told.label, told.verdict)
    assert {cell.fit.verdict for cell in cells} >= {"fits"}


def test_several_nodes_have_listed_recipes():
    ask = Made()
    cells = cells_at(places("--cards", "A100-80GB", "--gpus", "16", model="pixart-sigma"), ask)
    asked = {label for label, *_ in ask.asked}
    assert any(label.startswith("hsdp") for label in asked)
    assert all(cell.fit.label in asked for cell in cells)
