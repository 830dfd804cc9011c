"""Attention as public models call it, on tensors that stand for a GPU's: by keyword, with masks,
with fewer keys than queries."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils._python_dispatch import TorchDispatchMode

from harness.planner.tracing.cuda_calls import as_bias, cuda_like


class Ran(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def heads(count: int, tokens: int) -> torch.Tensor:
    return torch.empty(1, count, tokens, 64, dtype=torch.bfloat16, device="meta")


def kernels(kind: str, q: torch.Tensor, k: torch.Tensor, **more) -> set[str]:
    with cuda_like(kind), Ran() as ran:
        out = attend(query=q, key=k, value=k, **more)
    assert out.shape == q.shape
    return {name.split("_attention")[0].rpartition("product_")[2] for name in ran.names
            if "_scaled_dot_product" in name}  # fmt: skip


def test_a_call_by_keyword_runs_the_card_s_kernel():
    assert kernels("flash", heads(4, 32), heads(4, 32)) == {"flash"}
    assert kernels("cudnn", heads(4, 32), heads(4, 32)) == {"cudnn"}


def test_a_mask_keeps_flash_away():
    mask = torch.ones(1, 1, 1, 32, dtype=torch.bool, device="meta")
    assert kernels("flash", heads(4, 32), heads(4, 32), attn_mask=mask) == {"efficient"}


def test_fewer_keys_than_queries_are_not_repeated_for_flash():
    grouped = dict(enable_gqa=True)
    assert kernels("flash", heads(4, 32), heads(2, 32), **grouped) == {"flash"}
    assert kernels("efficient", heads(4, 32), heads(4, 32)) == set(), "bfloat16 on an old card"
    q, k = (t.to(torch.float16) for t in (heads(4, 32), heads(2, 32)))
    assert kernels("efficient", q, q) == {"efficient"}
    assert kernels("efficient", q, k, **grouped) == set(), "it wants a key for each head"


@pytest.mark.parametrize(
    ("shape", "held"),
    [
        ((1, 1, 1, 32), 32 * 2),
        ((1, 1, 1, 20), 24 * 2),  # a row that is no multiple of 8 is padded
        ((1, 1, 32, 32), 32 * 32 * 2),
        ((1, 1, 20, 20), 20 * 24 * 2),
    ],
)
def test_a_boolean_mask_becomes_numbers_of_the_queries_type(shape, held):
    tokens = shape[-1]
    q = heads(4, tokens)
    bias = as_bias(torch.ones(shape, dtype=torch.bool, device="meta"), q, q, padded=True)
    assert bias.dtype is torch.bfloat16 and bias.shape == (1, 4, tokens, tokens)
    assert bias.untyped_storage().nbytes() == held


def test_a_mask_of_numbers_is_taken_as_it_is():
    q, mask = heads(4, 32), torch.zeros(1, 1, 1, 32, dtype=torch.bfloat16, device="meta")
    bias = as_bias(mask, q, q, padded=True)
    assert bias.untyped_storage()._cdata == mask.untyped_storage()._cdata


def test_what_a_bias_says_is_what_the_mask_said():
    mask = torch.tensor([True, False, True]).view(1, 1, 1, 3)
    q = torch.zeros(1, 2, 3, 8)
    bias = as_bias(mask, q, q, padded=True)
    assert bias[0, 0, 0].tolist() == [0.0, float("-inf"), 0.0]
