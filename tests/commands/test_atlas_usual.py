"""Which recipes an atlas traces, on made-up memory: another kind of card says what is far from the
answer, and DDP is traced on one number of GPUs."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from harness.planner.atlas.cells import Replicas
from harness.planner.atlas.command import add_arguments, places_of
from harness.planner.atlas.growth import NEAR, usual_cells
from harness.planner.overhead import fixed_overhead
from harness.planner.verdict import judge
from harness.prediction import Work
from harness.system import cards
from tests.made.predictions import GIB, prediction

pytestmark = pytest.mark.usefixtures("sure")

USUAL, OTHER = "A100-80GB", "H100-80GB"
SINGLE = "single+bf16+checkpoint"


class Made:
    """An ``Ask``: what recipes need and take; on a card of the other kind by so much ``more``, and
    the first of them so much ``longer``."""

    def __init__(
        self,
        needs: dict[str, float],
        seconds: dict[str, float] | None = None,
        more: float = 0.0,
        longer: float = 0.0,
    ) -> None:
        self.needs, self.seconds, self.more, self.longer = needs, seconds or {}, more, longer
        self.asked: list[tuple[str, int, str]] = []

    def __call__(self, pairs, why):
        return [judge(row, self.made(place, row), place.asked.gpu) for place, row in pairs]

    def made(self, place, row):
        label, other = str(row.recipe), place.card == OTHER
        self.asked.append((label, row.spec.processes, place.card))
        need = self.needs.get(label, 200.0) * (1 + self.more * other)
        seconds = self.seconds.get(label, 9.0) * (1 + self.longer * (other and label == SINGLE))
        work = {"kind": "product", "dtype": "bfloat16", "flops": int(seconds * 4e14), "bytes": 1}
        return prediction(need, work=[Work(phase="forward", count=1, **work)])


def places(*words: str):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return places_of("dit-xl-2", parser.parse_args(["--growth", "0", *words]))


def cells(ask, *words: str) -> dict[tuple[int, str, str], object]:
    found = usual_cells(places(*words), ask)
    return {(cell.gpus, cell.card, cell.training): cell for _, cell in found}


EIGHT = "single+bf16_pure+checkpoint+adam8bit"
ALONE = {SINGLE: 40.0, EIGHT: 30.0}
FASTER = {SINGLE: 1.0, EIGHT: 2.0}
BOTH = ["--cards", USUAL, OTHER, "--gpus", "1"]


def of(ask: Made, card: str) -> set[str]:
    return {label for label, _, name in ask.asked if name == card and "lora" not in label}


def test_of_the_second_kind_only_what_may_be_the_answer_is_traced():
    ask = Made(ALONE, FASTER, more=0.01)
    found = cells(ask, *BOTH)
    assert of(ask, USUAL) >= {*ALONE} and of(ask, OTHER) == {SINGLE}
    fits = [found[1, card, "all weights"].fit for card in (USUAL, OTHER)]
    assert [fit.label for fit in fits] == [SINGLE, SINGLE]
    assert fits[1].prediction.bytes > fits[0].prediction.bytes, "of its own trace"


def test_a_card_without_another_kind_before_it_has_all_traced():
    ask = Made(ALONE)
    cells(ask, "--cards", OTHER, "--gpus", "1")
    assert of(ask, OTHER) >= {*ALONE}


@pytest.mark.parametrize("share", [-0.8 * NEAR, 0.8 * NEAR])
@pytest.mark.parametrize("more", [-0.8 * NEAR, 0.8 * NEAR])
def test_what_is_near_the_card_is_traced_on_it(share, more):
    """The faster recipe may fit or not: its own trace tells, and the answer is the one that traces
    of all would give."""
    gpu = cards.find(OTHER)
    beside = fixed_overhead(gpu, 1).total + gpu.beside
    near = {SINGLE: (gpu.memory_bytes * (1 + share) - beside) / GIB, EIGHT: 30.0}
    ask = Made(near, FASTER, more=more)
    found = cells(ask, *BOTH)[1, OTHER, "all weights"]
    assert SINGLE in of(ask, OTHER)
    alone = cells(Made(near, FASTER, more=more), "--cards", OTHER, "--gpus", "1")
    assert found.texts[:-1] == alone[1, OTHER, "all weights"].texts[:-1]


@pytest.mark.parametrize("longer", [0.0, 0.8 * NEAR])
def test_what_is_nearly_as_fast_is_traced_on_it(longer):
    """On the other kind of card the first of two takes longer: perhaps the second is faster."""
    ask = Made(ALONE, {SINGLE: 1.0, EIGHT: 1 + 0.4 * NEAR}, longer=longer)
    found = cells(ask, *BOTH)[1, OTHER, "all weights"]
    assert of(ask, OTHER) == {SINGLE, EIGHT}
    assert found.fit.label == (EIGHT if longer else SINGLE)


def test_what_another_kind_of_card_left_out_is_traced_where_it_is_needed():
    """Two larger cards of one kind leave out what is slower than a recipe that fits there; on a
    small one of the other kind that does not fit, and the slower one is the answer."""
    needs = {SINGLE: 60.0, "zero3_offload+bf16+checkpoint": 15.0}
    words = ["--cards", OTHER, "H200-141GB", "RTX-3090", "--gpus", "1"]
    ask = Made(needs)
    found = cells(ask, *words)[1, "RTX-3090", "all weights"]
    assert found.fit.label == "zero3_offload+bf16+checkpoint" and found.fit.fits
    assert "zero3_offload+bf16+checkpoint" not in of(ask, OTHER)


def test_where_nothing_fits_the_nearest_is_of_its_own_trace():
    ask = Made({SINGLE: 300.0}, more=0.01)
    found = cells(ask, *BOTH)[1, OTHER, "all weights"]
    assert found.fit.verdict == "no" and (found.fit.label, 1, OTHER) in ask.asked


def test_ddp_is_traced_on_one_number_of_gpus():
    ask = Made({})
    found = cells(Replicas(ask), "--cards", USUAL, "--gpus", "4", "8")
    counts: dict[str, set[int]] = {}
    for label, processes, _ in ask.asked:
        counts.setdefault(label.split("+")[0], set()).add(processes)
    assert counts.pop("ddp") == {4} and set(map(frozenset, counts.values())) == {frozenset({4, 8})}
    assert {n: cell.fit.resolved.spec.processes for (n, *_), cell in found.items()} == {4: 4, 8: 8}


def test_replicas_with_other_samples_a_gpu_are_traced_apart():
    ask, (place,) = Made({}), places("--cards", USUAL, "--gpus", "4")
    row = next(r for r in place.asked.resolved if "replicas" in r.launch.traits)
    twice = dataclasses.replace(row, spec=dataclasses.replace(row.spec, global_batch=8))
    replicas = Replicas(ask)
    replicas([(place, row), (place, twice)], "")
    assert len(replicas.traced) == 2
