"""Each family of public models in miniature on two processes: it trains as alone, with evidence."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import pytest
from conftest import Case, forget, launched_together, trained_here

from harness.result import Result, Status
from strategies import parse
from tests.made.publics import MINIATURES, miniature

RECIPES = ("ddp", "zero2", "zero3", "ddp+lora", "ddp+checkpoint")
IN_TURN = [*zip(MINIATURES, itertools.cycle(RECIPES), strict=False)]
STEPS = 2
NEAR = 1e-4
"""How far losses and gradient norms may be from those of one process, relative."""
UNLIKE = ("flux-dev", "wan2.1-1.3b", "z-image", "sana-1.6b", "mochi")
"""Two groups of blocks; a video; refiners; linear attention; trained rotary frequencies."""
AT_ONCE = [
    *((name, "zero3+checkpoint") for name in UNLIKE),
    ("qwen-image", "zero2+lora"),  # weights that get no gradient
    ("sd3.5-medium", "zero3+lora:targets=attention"),  # a block that attends twice
]
"""Model and recipe of several kinds."""


def without_ranks(recipe: str) -> str:
    """The same mathematics on one process: what is recomputed is what it was."""
    kept = [part for part in recipe.split("+")[1:] if part != "checkpoint"]
    return "+".join(["single", *kept])


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Result]:
    base = tmp_path_factory.mktemp("families")
    runs = sorted((*IN_TURN, *AT_ONCE), key=lambda run: [*MINIATURES].index(run[0]))
    cases = {" ".join(run): Case(miniature(*run, processes=2, steps=1)) for run in runs}
    return launched_together(cases, base)


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[[str, str], list[float]]]:
    """Losses and gradient norms of a model and a recipe of one process, each trained once."""

    def train(name: str, recipe: str) -> list[float]:
        run, log = trained_here(miniature(name, recipe), STEPS)
        return [*log.all_losses(run), *log.all_norms()]

    yield functools.cache(train)
    forget()


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "recipe"), [*IN_TURN, *AT_ONCE])
def test_a_family_trains_on_two_processes_as_it_does_alone(model, recipe, results, alone):
    row = results[f"{model} {recipe}"]
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    assert row.spec.processes == len(row.ranks) == 2
    assert [check.name for check in row.audit if not check.ok] == []
    assert {part.name for part in parse(recipe).strategies} <= set(row.evidence)
    two = [*row.losses[:STEPS], *row.grad_norms[:STEPS]]
    assert two == pytest.approx(alone(model, without_ranks(recipe)), rel=NEAR)
    assert two[0] != two[1], "it learned nothing"
