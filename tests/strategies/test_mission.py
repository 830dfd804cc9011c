"""The mission's rows stay, by name (``tests.made.mission``): each is run here, or where its table
says. What is run here is left out of test_catalog and test_drawn."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from conftest import DRAWN, observe_here, showing

from harness import ROOT
from strategies import parse
from strategies.evidence.rules import effects
from strategies.workloads import SAMPLE
from tests.made import mission
from tests.made.mission import FITTING
from tests.made.stand_ins import STAND_INS


def shown(text: str, train_here, **fields) -> None:
    """Two steps of a recipe, and one that its parts watch: each has evidence of an effect."""
    run, log = train_here(dataclasses.replace(showing(text), **fields), 2)
    assert run.trained.optimizer_steps == 2 and len(log.losses) == 2
    observe_here(run, log, text)
    for part in parse(text).strategies:
        assert effects(part.evidence(run.trained)), f"{part} shows an effect"


@pytest.mark.parametrize("name", mission.TRAINED)
def test_it_trains_with_evidence(name, train_here):
    text = mission.TRAINED[name]
    fields = [more for word, more in FITTING.items() if f"+{word}" in text]
    shown(text, train_here, **(fields[0] if fields else {}))


@pytest.mark.parametrize("name", mission.STOOD_IN)
def test_it_trains_with_evidence_where_a_card_is_stood_in_for(name, train_here):
    text = mission.STOOD_IN[name]
    part = text.rpartition("+")[2]
    with contextlib.ExitStack() as stack:
        stack.enter_context(STAND_INS[part]())
        shown(text, train_here, **FITTING.get(part, {}))


@pytest.mark.parametrize("name", mission.DRAWN)
def test_it_draws_with_evidence(name, draw_here):
    drawn = draw_here(dataclasses.replace(DRAWN, recipe=mission.DRAWN[name]))
    for part in parse(mission.DRAWN[name], workload=SAMPLE).strategies:
        assert effects(part.evidence(drawn.trained)), f"{part} shows an effect"
    assert torch.isfinite(drawn.drawn).all()


@pytest.mark.parametrize("name", mission.LAUNCHED)
def test_it_is_launched_on_several_processes(name):
    files = ("worker/test_runs.py", "strategies/test_launched.py")
    lists = "".join((ROOT / "tests" / file).read_text(encoding="utf-8") for file in files)
    assert f'"{mission.LAUNCHED[name]}"' in lists


@pytest.mark.parametrize("name", mission.TESTS)
def test_a_file_of_tests_runs_it(name):
    assert "def test_" in (ROOT / "tests" / mission.TESTS[name]).read_text()
