"""The float32 master of DeepSpeed begins as weights that were rounded to 16 bits: the effect of
that alone on the first steps (docs/explanation/noise-and-fairness.md)."""

from __future__ import annotations

import pytest
import torch

from harness.spec import Spec

pytestmark = pytest.mark.thorough

LOSSES = {
    "ddp+bf16": [1.0716253519058228, 1.0587427616119385],
    "zero2+bf16": [1.0716345310211182, 1.0624346733093262],
}
"""Recipe -> its first two losses on two CPU processes, measured by ``./run.sh run --steps 5``."""
SPEC = Spec(
    recipe="single+bf16", model="DiT-S/2:width=192,heads=3", global_batch=8, steps=5, warmup=2
)


@torch.no_grad()
def rounded(run) -> None:
    for p in run.trained.module.parameters():
        p.copy_(p.bfloat16())


@pytest.mark.parametrize(
    ("first", "measured"),
    [(lambda run: None, "ddp+bf16"), (rounded, "zero2+bf16")],
    ids=["float32", "rounded"],
)
def test_a_start_on_16_bits_is_what_sets_zero_apart(first, measured, train_here):
    assert LOSSES["zero2+bf16"][1] / LOSSES["ddp+bf16"][1] - 1 > 3e-3
    _, log = train_here(SPEC, len(LOSSES[measured]), first=first)
    assert log.losses == pytest.approx(LOSSES[measured], rel=5e-5)
