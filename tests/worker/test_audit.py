"""The audit: each check holds for a real run, and fails when its fact is wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from conftest import TINY

from harness.resolve import resolve
from harness.worker.audit import STEPS_TO_MOVE, audit, gather
from harness.worker.loop import optimizer_step
from harness.worker.projections import Watch


def facts_of(run, **more):
    return {"run": run, "losses": run.all_losses(), **more}


@pytest.fixture
def facts(train_here):
    return facts_of(train_here(TINY, 3))


def failed(facts) -> set[str]:
    return {check.name for check in audit(**facts) if not check.ok}


def in_another_order(facts):
    facts["run"].log.positions[0] = [m[::-1].copy() for m in facts["run"].log.positions[0]]


def left_out(facts):
    facts["run"].log.positions[1] = [m[:-1] for m in facts["run"].log.positions[1]]


def in_halves(facts):
    facts["run"].log.positions = [[*np.split(step[0], 2)] for step in facts["run"].log.positions]


def stepped_less_often(facts):
    next(iter(facts["run"].inner_optimizer.state.values()))["step"] -= 1


def a_step_not_taken(facts):
    facts["run"].optimizer_steps += 1


def no_number(facts):
    facts["losses"][-1] = float("nan")


def other_processes(facts):
    spec = dataclasses.replace(TINY, processes=2, recipe="ddp", global_batch=8)
    facts["run"].resolved = resolve(spec)


def another_clipping(facts):
    facts["run"].resolved = resolve(dataclasses.replace(TINY, grad_clip=1.0))


FAULTS = {
    in_another_order: {"data order"},
    left_out: {"data order", "global batch", "micro batch"},
    in_halves: {"micro batch", "accumulation"},
    stepped_less_often: {"steps of each weight"},
    a_step_not_taken: {"optimizer steps", "steps of each weight"},
    no_number: {"losses finite"},
    other_processes: {"processes", "engine", "global batch", "data order"},
    another_clipping: {"gradient clipping"},
}
"""What is wrong -> the checks that must fail."""


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda spoil: spoil.__name__)
def test_a_wrong_fact_is_noticed(spoil, facts):
    assert failed(facts) == set() and len(audit(**facts)) >= 10
    spoil(facts)
    found = failed(facts)
    assert FAULTS[spoil] <= found and (found == FAULTS[spoil] or spoil is other_processes)


def test_a_parameter_that_stands_still_or_is_not_watched_is_noticed_and_named(train_here):
    run = train_here(TINY, 0)
    watch = Watch(run, run.feed)
    for step in range(STEPS_TO_MOVE):
        optimizer_step(run, step)
    did = watch.end(gather)
    watched = facts_of(run, did=did)
    assert failed(watched) == set()
    name = next(iter(did.update))
    did.update[name] = [0.0] * len(did.update[name])
    assert failed(watched) == set(), "its moment shows that it was stepped: bf16 may lose an update"
    did.moment[name] = [0.0] * len(did.moment[name])
    (check,) = [c for c in audit(**watched) if not c.ok]
    assert check.name == "parameters that were not stepped" and check.found == [name]
    del did.update[name]
    assert "parameters watched" in failed(watched)


def test_clipping_is_read_off_the_gradients(train_here):
    spec = dataclasses.replace(TINY, grad_clip=0.01)
    run = train_here(spec, 2)
    before, after = run.log.clipped
    assert before > 0.1 and after == pytest.approx(0.01, rel=1e-4)
    found = facts_of(run)
    assert failed(found) == set()
    run.log.clipped = (before, before)  # as if the gradients had stayed as they were
    assert failed(found) == {"gradient clipping"}
