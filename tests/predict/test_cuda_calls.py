"""Calls of torch on tensors that stand for a GPU's run CUDA's ops: autocast, norms, dropout,
attention with masks and fewer keys than queries."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils._python_dispatch import TorchDispatchMode

from harness.planner.tracing import cuda_calls
from harness.planner.tracing.cuda_calls import as_bias, cuda_like

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
def x():
    return torch.empty(2, 9, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)


def test_a_norm_is_one_kernel_that_keeps_a_number_per_row(x):
    norm = torch.nn.RMSNorm(128, device="meta", dtype=torch.bfloat16)
    with cuda_like("flash"):
        out = norm(x)
    given, weight, deviation = out.grad_fn.saved_tensors
    assert given is x and weight is norm.weight and out.dtype is x.dtype
    assert deviation.shape == (2, 9, 1) and deviation.dtype is torch.float32
    with cuda_like("flash"):
        assert "RMSNorm" not in norm.float()(x).grad_fn.name(), "weights of another type"
    with cuda_like("flash"), torch.autocast("cuda", torch.bfloat16):
        out = norm.float()(x)
    assert out.dtype is torch.float32 and out.grad_fn.saved_tensors[0].dtype is torch.float32


def test_dropout_keeps_a_mask_of_bytes(x):
    with cuda_like("flash"):
        out = torch.nn.Dropout(0.1)(x)
    kept = out.grad_fn._saved_result1
    assert out.dtype is x.dtype and kept.dtype is torch.bool and kept.numel() == x.numel()
    with cuda_like("flash"):
        plain = torch.nn.functional.dropout(torch.ones(4, requires_grad=True), 0.1)
    assert not hasattr(plain.grad_fn, "_saved_result1"), "on a CPU it is noise"


class Ran(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def heads(count: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(1, count, tokens, 64, dtype=dtype, device="meta")


def kernels(kind: str, q: torch.Tensor, k: torch.Tensor, **more) -> set[str]:
    with cuda_like(kind), Ran() as ran:
        out = attend(query=q, key=k, value=k, **more)
    assert out.shape == q.shape
    return {name.split("_attention")[0].rpartition("product_")[2] for name in ran.names
            if "_scaled_dot_product" in name}  # fmt: skip


def test_a_call_by_keyword_runs_the_kernel_that_takes_it():
    q, few, half = heads(4, 32), heads(2, 32), heads(4, 32, torch.float16)
    assert kernels("flash", q, q) == {"flash"} and kernels("cudnn", q, q) == {"cudnn"}
    mask = torch.ones(1, 1, 1, 32, dtype=torch.bool, device="meta")
    assert kernels("flash", q, q, attn_mask=mask) == {"efficient"}
    assert kernels("flash", q, few, enable_gqa=True) == {"flash"}
    assert kernels("efficient", q, q) == set(), "bfloat16 on an old card"
    assert kernels("efficient", half, half) == {"efficient"}
    few = heads(2, 32, torch.float16)
    assert kernels("efficient", half, few, enable_gqa=True) == set(), "a key for each head"


@pytest.mark.parametrize(("shape", "held"), [
    ((1, 1, 1, 32), 32 * 2),
    ((1, 1, 1, 20), 24 * 2),  # a row that is no multiple of 8 is padded
    ((1, 1, 20, 20), 20 * 24 * 2),
])  # fmt: skip
def test_a_boolean_mask_becomes_numbers_of_the_queries_type(shape, held):
    q = heads(4, shape[-1])
    bias = as_bias(torch.ones(shape, dtype=torch.bool, device="meta"), q, q, padded=True)
    assert bias.dtype is torch.bfloat16 and bias.shape == (1, 4, shape[-1], shape[-1])
    assert bias.untyped_storage().nbytes() == held


def test_what_a_bias_says_is_what_the_mask_said():
    q = torch.zeros(1, 2, 3, 8)
    bias = as_bias(torch.tensor([True, False, True]).view(1, 1, 1, 3), q, q, padded=True)
    assert bias[0, 0, 0].tolist() == [0.0, float("-inf"), 0.0]
    q, told = heads(4, 32), torch.zeros(1, 1, 1, 32, dtype=torch.bfloat16, device="meta")
    same = as_bias(told, q, q, padded=True)
    assert same.untyped_storage()._cdata == told.untyped_storage()._cdata, "numbers stay"
