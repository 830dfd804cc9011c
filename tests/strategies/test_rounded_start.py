"""The float32 master of DeepSpeed begins as weights that were rounded to 16 bits: what that alone
does to the first steps, by the published rows (docs/explanation/noise-and-parity.md)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from harness import ROOT
from harness.result import load_all

pytestmark = pytest.mark.thorough

STEPS = 2
PUBLISHED = {row.spec.recipe: row for row in load_all(ROOT / "docs/results/cpu-2-cores")[0]}


@torch.no_grad()
def rounded(run) -> None:
    for p in run.trained.module.parameters():
        p.copy_(p.bfloat16())


@pytest.mark.parametrize(
    ("first", "as_published"),
    [(lambda run: None, "ddp+bf16"), (rounded, "zero2+bf16")],
    ids=["float32", "rounded"],
)
def test_a_start_on_16_bits_is_what_sets_zero_apart(first, as_published, train_here):
    published = PUBLISHED[as_published]
    spec = dataclasses.replace(published.spec, recipe="single+bf16", processes=1)
    near, other = (PUBLISHED[name].losses[1] for name in ("ddp+bf16", "zero2+bf16"))
    assert other / near - 1 > 3e-3
    _, log = train_here(spec, STEPS, first=first)
    assert log.losses == pytest.approx(published.losses[:STEPS], rel=5e-5)
