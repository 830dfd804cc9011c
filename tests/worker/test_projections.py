"""Signed sums: pieces add up to the whole, and the signs are the same everywhere."""

from __future__ import annotations

import pytest
import torch

from harness.spec import Spec
from harness.worker.audit import gather
from harness.worker.loop import optimizer_step
from harness.worker.projections import PERIOD, SIGNS, Watch, project, signs

SPEC = Spec(recipe="single", model="DiT-T/4:depth=2", global_batch=4, warmup=1, steps=3)


def test_the_signs_are_as_many_plus_as_minus_and_never_change():
    table = signs("cpu")
    assert table.shape == (PERIOD, SIGNS) and table.abs().eq(1).all()
    assert table.mean(0).abs().max() < 0.02
    assert (table.T @ table / PERIOD - torch.eye(SIGNS)).abs().max() < 0.02, "each its own"
    assert table[:6, 0].tolist() == [1.0, 1.0, 1.0, 1.0, -1.0, 1.0], "results are kept for years"


def test_pieces_add_up_to_the_whole():
    cut = PERIOD + 5
    whole = torch.randn(2 * PERIOD + 77, generator=torch.Generator().manual_seed(0))
    table = signs("cpu")
    pieces = [project(whole[:cut], "a", 0, table), project(whole[cut:], "a", cut, table)]
    torch.testing.assert_close(sum(pieces), project(whole, "a", 0, table), rtol=1e-12, atol=1e-9)


def test_what_was_done_is_the_difference_that_was_made(train_here):
    run = train_here(SPEC, 0)
    watch = Watch(run, run.feed)
    run.log.inputs = watch.inputs
    before = {n: p.detach().clone() for n, p in run.module.named_parameters()}
    for step in range(4):
        optimizer_step(run, step)
    did, table = watch.end(gather), signs("cpu")
    for name, p in run.module.named_parameters():
        if p.requires_grad:
            moved = (p.detach().double() - before[name].double()).flatten()
            expected = pytest.approx(project(moved, name, 0, table).tolist(), rel=1e-6, abs=1e-9)
            assert did.update[name] == expected
            moment = run.inner_optimizer.state[p]["exp_avg"].flatten()
            assert did.moment[name] == pytest.approx(
                project(moment, name, 0, table).tolist(), rel=1e-6, abs=1e-12
            )
    assert set(did.update) == set(did.moment) == set(did.average) and any(did.inputs["noise"])
