"""The audit: each check holds for a real run, and fails when its fact is wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from conftest import TINY

from harness.audit import audit, weights_digest
from harness.resolve import resolve


@pytest.fixture
def facts(train_here):
    run, log = train_here(TINY, 3)
    return {
        "resolved": resolve(TINY), "trained": run.trained, "positions": log.positions,
        "losses": log.all_losses(run), "digest": run.digest,
    }  # fmt: skip


def failed(facts) -> set[str]:
    return {check.name for check in audit(**facts) if not check.ok}


def test_a_real_run_passes(facts):
    assert failed(facts) == set()
    assert len(audit(**facts)) >= 10


def test_samples_in_another_order_are_noticed(facts):
    facts["positions"][0] = [m[::-1].copy() for m in facts["positions"][0]]
    assert failed(facts) == {"data order"}


def test_samples_that_were_left_out_are_noticed(facts):
    facts["positions"][1] = [m[:-1] for m in facts["positions"][1]]
    assert failed(facts) == {"data order", "global batch", "micro batch"}


def test_another_number_of_micro_batches_is_noticed(facts):
    facts["positions"] = [[*np.split(step[0], 2)] for step in facts["positions"]]
    assert failed(facts) == {"micro batch", "accumulation"}


def test_a_step_not_taken_is_noticed(facts):
    facts["trained"].optimizer_steps += 1
    assert failed(facts) == {"optimizer steps"}


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


def test_one_changed_weight_changes_the_digest():
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 4)
    before = weights_digest(module)
    with torch.no_grad():
        module.weight[2, 1] = torch.nextafter(module.weight[2, 1], torch.tensor(9.0))
    assert weights_digest(module) != before
