"""Autocast's ops and the norm's kernel in a trace for a GPU are those of CUDA."""

from __future__ import annotations

import pytest
import torch

from harness.planner.tracing import cuda_calls
from harness.planner.tracing.cuda_calls import cuda_like

NAMES = {
    "grid_sampler": "grid_sample", "nll_loss2d": "nll_loss",
    "_convolution": "convolution", "cudnn_convolution": "convolution",
    "cudnn_convolution_transpose": "convolution",
    "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
}  # fmt: skip
"""Op that autocast casts -> function that a model calls."""
RECURRENT = {
    "_cudnn_rnn",  # registered by a build of torch for CUDA
    *(f"{kind}_cell" for kind in ("rnn_tanh", "rnn_relu", "gru", "lstm", "_thnn_fused_gru",
                                  "_thnn_fused_lstm")),
}  # fmt: skip


def test_no_op_that_autocast_casts_is_missing():
    ops = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    names = {name.partition("::")[2].partition(".")[0] for name in ops if name.startswith("aten")}
    called = {
        "interpolate" if name.lstrip("_").startswith("upsample") else NAMES.get(name, name)
        for name in names - RECURRENT
    }
    assert "rms_norm" in called
    assert called <= cuda_calls.LOWER | cuda_calls.FLOAT32 | cuda_calls.WIDEST


@pytest.fixture
def norm():
    return torch.nn.RMSNorm(128, device="meta", dtype=torch.bfloat16)


@pytest.fixture
def x():
    return torch.empty(2, 9, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)


def test_a_norm_is_one_kernel_that_keeps_a_number_per_row(norm, x):
    with cuda_like("flash"):
        out = norm(x)
    given, weight, deviation = out.grad_fn.saved_tensors
    assert given is x and weight is norm.weight and out.dtype is x.dtype
    assert deviation.shape == (2, 9, 1) and deviation.dtype is torch.float32
    out.sum().backward()
    assert x.grad.dtype is norm.weight.grad.dtype is torch.bfloat16


def test_weights_of_another_type_make_it_parts(norm, x):
    with cuda_like("flash"):
        assert "RMSNorm" not in norm.float()(x).grad_fn.name()


def test_autocast_computes_it_in_float32(norm, x):
    with cuda_like("flash"), torch.autocast("cuda", torch.bfloat16):
        out = norm.float()(x)
    assert out.dtype is torch.float32 and out.grad_fn.saved_tensors[0].dtype is torch.float32
    assert x.grad is None and out.grad_fn.saved_tensors[1] is norm.weight
