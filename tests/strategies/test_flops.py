"""FLOPs that evidence counts on what runs: by hand, whatever kernel computes the attention."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import TINY
from torch.utils.flop_counter import FlopCounterMode

from harness.subjects.dit.presets import PRESETS, forward_flops
from strategies.evidence.flops import counting
from strategies.sparsity import prune_structured

TOKENS, WIDTH, DEPTH, INPUTS, OUTPUTS = 64, 384, 12, 64, 128
"""DiT-S/4 on latents of 4 x 32 x 32: a patch is 4 x 4 x 4 in, and mean and variance out."""


def by_hand(inner: int, hidden: int) -> int:
    """Multiply-adds as two, of one sample's forward: ``inner`` is the width of all heads that are
    left, ``hidden`` that of the MLP."""
    attention = 2 * TOKENS * TOKENS * inner
    layers = TOKENS * WIDTH * (3 * inner + inner + 2 * hidden)
    blocks = DEPTH * (attention + layers + WIDTH * 6 * WIDTH)
    ends = TOKENS * INPUTS * WIDTH + TOKENS * WIDTH * OUTPUTS + WIDTH * 2 * WIDTH
    timestep = 256 * WIDTH + WIDTH * WIDTH
    return 2 * (blocks + ends + timestep)


@pytest.mark.parametrize("kernel", ["flash", "math", "naive"])
def test_a_pruned_model_has_the_flops_of_the_hand_count(kernel, train_here):
    text = f"single+prune_structured+attend:kernel={kernel}+ema:place=none"
    run, _ = train_here(dataclasses.replace(TINY, recipe=text, model="DiT-S/4"), 0)
    assert prune_structured.forward_flops(run.trained) == by_hand(192, 768) == 1_428_455_424


def test_a_whole_model_has_the_flops_of_the_closed_form(train_here):
    run, _ = train_here(dataclasses.replace(TINY, model="DiT-S/4"), 0)
    counted = prune_structured.forward_flops(run.trained)
    assert counted == by_hand(384, 1536) == forward_flops(PRESETS["DiT-S/4"], 32, batch=1)


def test_fused_attention_and_its_backward_count_as_the_products_that_they_are():
    q, k, v = (torch.randn(1, 3, 64, 64, requires_grad=True) for _ in range(3))
    product = 2 * 3 * 64 * 64 * 64
    with counting() as counter:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        forward = counter.get_total_flops()
        out.sum().backward()
    # Forward: q k^T and scores v. Backward: the scores again, and two of each of these two.
    assert (forward, counter.get_total_flops() - forward) == (2 * product, 5 * product)
    with FlopCounterMode(display=False) as torchs:
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert torchs.get_total_flops() in (0, 2 * product), "0 where torch knows no such kernel"
