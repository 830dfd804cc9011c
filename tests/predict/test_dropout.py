"""Dropout in a trace for a GPU is CUDA's own: it keeps a mask of a byte an element."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import dropout

from harness.planner.tracing.cuda_calls import cuda_like


@pytest.fixture
def x():
    return torch.empty(4, 1024, dtype=torch.bfloat16, device="meta", requires_grad=True)


def test_a_mask_of_bytes_is_kept(x):
    with cuda_like("flash"):
        out = torch.nn.Dropout(0.1)(x)
    kept = out.grad_fn._saved_result1
    assert out.shape == x.shape and out.dtype is x.dtype
    assert kept.dtype is torch.bool and kept.numel() == x.numel()


def test_elsewhere_it_is_noise_of_the_input_s_type(x):
    """The control: what the trace would keep if it were left to ``meta``."""
    assert not hasattr(dropout(x, 0.1).grad_fn, "_saved_result1")
    with cuda_like("flash"):
        assert not hasattr(
            dropout(torch.ones(4, requires_grad=True), 0.1).grad_fn, "_saved_result1"
        )
