"""FLOPs that evidence counts on what runs: by hand, whatever kernel computes the attention."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from conftest import TINY

from strategies.evidence.flops import counting, formulas
from strategies.evidence.states import forward_once

TOKENS, WIDTH, DEPTH, INPUTS, OUTPUTS = 64, 384, 12, 64, 128
"""DiT-S/4 on latents of 4 x 32 x 32: a patch is 4 x 4 x 4 in, and mean and variance out."""


def by_hand(inner: int, hidden: int) -> int:
    """Of one sample's forward: ``inner`` is the width of all heads left, ``hidden`` the MLP's."""
    attention = 2 * TOKENS * TOKENS * inner
    layers = TOKENS * WIDTH * (3 * inner + inner + 2 * hidden)
    blocks = DEPTH * (attention + layers + WIDTH * 6 * WIDTH)
    ends = TOKENS * INPUTS * WIDTH + TOKENS * WIDTH * OUTPUTS + WIDTH * 2 * WIDTH
    timestep = 256 * WIDTH + WIDTH * WIDTH
    return 2 * (blocks + ends + timestep)


@pytest.mark.parametrize("kernel", ["flash", "naive"])
def test_a_pruned_model_has_the_flops_of_the_hand_count(kernel, train_here):
    text = f"single+prune_structured+attend:kernel={kernel}+ema:place=none"
    run = train_here(dataclasses.replace(TINY, recipe=text, model="DiT-S/4"), 0)
    with counting() as counter:
        forward_once(run)
    assert counter.get_total_flops() == by_hand(192, 768) == 1_428_455_424


aten, nn = torch.ops.aten, torch.nn.functional


def flash(q, k, v):
    """A GPU's attention kernel on tensors without memory."""
    return aten._scaled_dot_product_flash_attention(q, k, v)[0]


Q, K = (2, 3, 8, 16), (2, 3, 24, 16)
ATTENTION = 2 * 2 * 3 * 8 * 24 * 16
"""FLOPs of one of attention's products; forward has two, backward five (the scores once more)."""
PLACES = 2 * 2 * 25 * 9 * 6 * 4
"""Of a convolution: samples x places x elements of the kernel x channels out x channels in of one
group, multiply-adds as two."""
# name -> function, shapes of its operands, FLOPs forward and backward
BY_HAND = {
    "mm": (torch.mm, [(5, 7), (7, 3)], 2 * 105, 4 * 105),
    "conv2d": (
        partial(nn.conv2d, stride=2, padding=1), [(2, 4, 9, 9), (6, 4, 3, 3)], PLACES, 2 * PLACES,
    ),
    "depthwise conv1d": (
        partial(nn.conv1d, groups=8, dilation=2), [(2, 8, 20), (8, 1, 3)],
        2 * 2 * 16 * 3 * 8, 4 * 2 * 16 * 3 * 8,
    ),
    "flash": (flash, [Q, K, K], 2 * ATTENTION, 5 * ATTENTION),
    "grouped heads": (flash, [(2, 6, 8, 16), K, K], 2 * 2 * ATTENTION, 2 * 5 * ATTENTION),
}  # fmt: skip


def both_ways(run, operands) -> tuple[int, int]:
    """FLOPs of ``run`` forward, and of its backward pass."""
    with counting() as counter:
        out = run(*operands)
        forward = counter.get_total_flops()
        out.float().sum().backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("name", BY_HAND)
def test_forward_and_backward_count_as_by_hand(name):
    run, shapes, *known = BY_HAND[name]
    operands = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
    assert [*both_ways(run, operands)] == known


def test_a_gradient_that_nobody_wants_counts_nothing():
    weight = torch.empty(64, 1, 3, 3, device="meta", requires_grad=True)
    x = torch.empty(2, 64, 9, 9, device="meta")
    forward, backward = both_ways(partial(nn.conv2d, groups=64), [x, weight])
    assert forward == backward == 2 * 2 * 49 * 9 * 64


def test_products_of_few_bits_and_a_fused_loss_count_as_the_products_that_they_are():
    a, b = (torch.empty(n, 32, device="meta").to(torch.float8_e4m3fn) for n in (16, 48))
    one, product = torch.empty((), device="meta"), 2 * 16 * 32 * 48
    x, weight = torch.randn(16, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    targets, options = torch.zeros(16, dtype=torch.long), torch.nn.LinearCrossEntropyOptions()
    with counting() as counter:
        torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        assert counter.get_total_flops() == product
        torch._int_mm(a.to(torch.int8), b.to(torch.int8).t())
        assert counter.get_total_flops() == 2 * product
        nn.linear_cross_entropy(x, weight, targets, reduction="sum", options=options)
        assert counter.get_total_flops() == (2 + 3) * product, "gradients are made in forward"
    pytest.importorskip("bitsandbytes")
    assert formulas()[torch.ops.bitsandbytes.gemm_4bit](x, None, (48, 32)) == product
