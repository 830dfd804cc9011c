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


def test_a_start_on_16_bits_is_what_sets_zero_apart(train_here):
    """The published row without it is the control: far from what is expected here."""
    published, control = (PUBLISHED[name] for name in ("zero2+bf16", "ddp+bf16"))
    spec = dataclasses.replace(published.spec, recipe="single+bf16", processes=1)
    assert published.losses[1] / control.losses[1] - 1 > 3e-3
    _, log = train_here(spec, STEPS, first=rounded)
    assert log.losses == pytest.approx(published.losses[:STEPS], rel=5e-5)
