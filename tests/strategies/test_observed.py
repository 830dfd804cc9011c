"""The step that is watched for evidence: what it notes, and that it leaves nothing behind."""

from __future__ import annotations

import dataclasses

import torch
from conftest import FLAT, TINY, observe_here

MUON = "single+muon+accumulate"
SHORT = dataclasses.replace(TINY, model=FLAT)


def test_a_watched_step_leaves_no_hook_behind(train_here):
    run, log = train_here(dataclasses.replace(SHORT, recipe=MUON), 2)
    trained, backward = run.trained, run.trained.accelerator.backward
    optimizer = trained.inner_optimizer
    before = len(optimizer._optimizer_step_post_hooks), len(optimizer._optimizer_step_pre_hooks)
    observe_here(run, log, MUON)
    hooks = len(optimizer._optimizer_step_post_hooks), len(optimizer._optimizer_step_pre_hooks)
    assert hooks == before and trained.accelerator.backward == backward
    assert trained.observed.micro_steps == 2 and trained.optimizer_steps == 3
    assert not any(p._post_accumulate_grad_hooks for p in trained.module.parameters())


def test_a_watched_step_trains_as_any_other(train_here):
    spec = dataclasses.replace(SHORT, recipe="single+accumulate")
    watched, log = train_here(spec, 2)
    observe_here(watched, log, spec.recipe)
    plain, other = train_here(spec, 3)
    assert log.all_losses(watched) == other.all_losses(plain)
    for mine, theirs in zip(
        watched.trained.module.parameters(), plain.trained.module.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_operators_are_told_apart_by_phase_and_type(train_here):
    run, log = train_here(dataclasses.replace(TINY, recipe="single+bf16"), 1)
    observe_here(run, log, "single+bf16")
    seen = run.trained.observed
    # Fetching samples is none of the step's phases.
    assert {ran.phase for ran in seen.ran} == {"data", "forward", "backward", "optimizer"}
    assert seen.products("forward").keys() == {"bfloat16"} and not seen.products("optimizer")
    assert seen.products("backward")["bfloat16"] > seen.products("forward")["bfloat16"]
    assert any("_fused_adamw_" in ran.name for ran in seen.ran if ran.phase == "optimizer")
    assert seen.sent == [], "one process sends nothing"


# -- settings ---------------------------------------------------------------------------------


# -- on the wire ------------------------------------------------------------------------------


