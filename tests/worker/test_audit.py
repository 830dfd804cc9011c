"""The audit: each check holds for a real run, and fails when its fact is wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from conftest import TINY, weights_digest

from harness.resolve import resolve
from harness.worker.audit import STEPS_TO_MOVE, audit, gather
from harness.worker.loop import optimizer_step
from harness.worker.projections import Watch


@pytest.fixture
def facts(train_here):
    run, log = train_here(TINY, 3)
    return {
        "resolved": resolve(TINY), "trained": run.trained, "log": log,
        "losses": log.all_losses(run), "digest": run.digest,
    }  # fmt: skip


def failed(facts) -> set[str]:
    return {check.name for check in audit(**facts) if not check.ok}


def test_a_real_run_passes(facts):
    assert failed(facts) == set()
    assert len(audit(**facts)) >= 10


def test_samples_in_another_order_are_noticed(facts):
    facts["log"].positions[0] = [m[::-1].copy() for m in facts["log"].positions[0]]
    assert failed(facts) == {"data order"}


def test_samples_that_were_left_out_are_noticed(facts):
    facts["log"].positions[1] = [m[:-1] for m in facts["log"].positions[1]]
    assert failed(facts) == {"data order", "global batch", "micro batch"}


def test_another_number_of_micro_batches_is_noticed(facts):
    facts["log"].positions = [[*np.split(step[0], 2)] for step in facts["log"].positions]
    assert failed(facts) == {"micro batch", "accumulation"}


@pytest.fixture
def watched(train_here):
    """The same facts, and what the optimizer did to each parameter."""
    run, log = train_here(TINY, 0)
    watch = Watch(run.trained, run.feed)
    for step in range(STEPS_TO_MOVE):
        optimizer_step(run, step, log)
    facts = {"resolved": resolve(TINY), "trained": run.trained, "log": log, "digest": run.digest}
    return {**facts, "losses": log.all_losses(run), "did": watch.end(gather)}


def test_a_parameter_that_stands_still_is_noticed_and_named(watched):
    assert failed(watched) == set()
    did = watched["did"]
    name = next(iter(did.update))
    did.update[name] = [0.0] * len(did.update[name])
    assert failed(watched) == set(), "its moment shows that it was stepped: bf16 may lose an update"
    did.moment[name] = [0.0] * len(did.moment[name])
    (check,) = [c for c in audit(**watched) if not c.ok]
    assert check.name == "parameters that were not stepped" and check.found == [name]


def test_a_parameter_that_is_not_watched_is_noticed(watched):
    watched["did"].update.popitem()
    assert failed(watched) == {"parameters watched"}


def test_a_state_that_was_stepped_less_often_is_noticed(facts):
    state = next(iter(facts["trained"].inner_optimizer.state.values()))
    state["step"] -= 1
    assert failed(facts) == {"steps of each weight"}


def test_a_step_not_taken_is_noticed(facts):
    facts["trained"].optimizer_steps += 1
    assert failed(facts) == {"optimizer steps", "steps of each weight"}


def test_a_loss_that_is_no_number_is_noticed(facts):
    facts["losses"][-1] = float("nan")
    assert failed(facts) == {"losses finite"}


def test_other_processes_and_another_batch_are_noticed(facts):
    spec = dataclasses.replace(TINY, processes=2, recipe="ddp", global_batch=8)
    facts["resolved"] = resolve(spec)
    assert {"processes", "engine", "global batch", "data order"} <= failed(facts)


def test_another_clipping_is_noticed(facts):
    spec = dataclasses.replace(TINY, grad_clip=1.0)
    facts["resolved"] = resolve(spec)
    assert failed(facts) == {"gradient clipping"}


def test_clipping_is_read_off_the_gradients(train_here):
    spec = dataclasses.replace(TINY, grad_clip=0.01)
    run, log = train_here(spec, 2)
    before, after = log.clipped
    assert before > 0.1 and after == pytest.approx(0.01, rel=1e-4)
    found = {"resolved": resolve(spec), "trained": run.trained, "log": log, "digest": run.digest}
    found["losses"] = log.all_losses(run)
    assert failed(found) == set()
    log.clipped = (before, before)  # as if the gradients had stayed as they were
    assert failed(found) == {"gradient clipping"}


def test_one_changed_weight_changes_the_digest():
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 4)
    before = weights_digest(module)
    with torch.no_grad():
        module.weight[2, 1] = torch.nextafter(module.weight[2, 1], torch.tensor(9.0))
    assert weights_digest(module) != before
