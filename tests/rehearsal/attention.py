"""Fused attention on the rehearsed cards: scaled dot products in float32, outputs as CUDA's.

Shapes, layouts and types of the outputs are those of torch's CUDA kernels
(torch/_meta_registrations.py), and the scratch of a backward kernel is allocated while it runs
(``harness.planner.overhead`` names the sources).
"""

from __future__ import annotations

import math

import torch

from harness.planner.overhead import scratch

__all__ = ["install"]


def scores(q, k, bias, causal, scale):
    """Scaled products (B, H, T, S) in float32 on the CPU, masked."""
    found = (scale or q.shape[-1] ** -0.5) * (host(q) @ host(k).transpose(-1, -2))
    if bias is not None:
        found = found + host(bias)
    if causal:
        found = found.masked_fill(torch.ones(found.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return found


def host(tensor):
    return tensor.cpu().float()


def like(values, kept):
    """``values`` (B, H, T, K) on the card, as (B, T, H, K) lies in memory."""
    batch, heads, tokens, width = values.shape
    made = kept.new_empty((batch, tokens, heads, width)).transpose(1, 2)
    return made.copy_(values.to(kept.dtype))


def forward(q, k, v, bias=None, causal=False, scale=None):
    """(output, log of the sum of exponentials (B, H, T) on the CPU)."""
    weights = scores(q, k, bias, causal, scale)
    return like(torch.softmax(weights, -1) @ host(v), q), torch.logsumexp(weights, -1)


def backward(op, gradient, q, k, v, bias, causal, scale, out, lse):
    """Gradients of q, k, v and, of the scores, of the bias. As CUDA's kernels, it takes ``out`` and
    ``lse`` as given."""
    size = scratch(f"aten.{op}.default", [gradient.shape, q.shape])
    held = torch.empty(size, dtype=torch.uint8, device=q.device)
    sums = host(lse).reshape(*q.shape[:2], -1)[..., : q.shape[2], None]
    weights = torch.exp(scores(q, k, bias, causal, scale) - sums)
    given = host(gradient)
    inner = given @ host(v).transpose(-1, -2)
    inner = weights * (inner - (given * host(out)).sum(-1, keepdim=True))
    scale = scale or q.shape[-1] ** -0.5
    found = (
        like(scale * inner @ host(k), q),
        like(scale * inner.transpose(-1, -2) @ host(q), k),
        like(weights.transpose(-1, -2) @ given, v),
        inner,
    )
    del held
    return found


def padded(lse, device, step):
    """(B, H, T) with T rounded up to ``step``, on the card."""
    made = torch.zeros((*lse.shape[:2], -(-lse.shape[2] // step) * step), device=device)
    made[..., : lse.shape[2]].copy_(lse)
    return made


def number(device, *shape, dtype=torch.int64):
    return torch.zeros(shape, dtype=dtype, device=device)


def efficient(q, k, v, bias, lse, dropout_p=0.0, is_causal=False, *, scale=None):
    out, sums = forward(q, k, v, bias, is_causal, scale)
    sums = padded(sums, q.device, 32) if lse else q.new_empty((*q.shape[:2], 0), dtype=torch.float)
    return out, sums, number("cpu"), number("cpu")


def efficient_backward(
    go, q, k, v, bias, out, lse, seed, offset, dropout_p, mask, is_causal=False, *, scale=None
):
    name = "_scaled_dot_product_efficient_attention_backward"
    dq, dk, dv, inner = backward(name, go, q, k, v, bias, is_causal, scale, out, lse)
    return dq, dk, dv, _sum_to(inner, bias) if mask[3] else None


def _sum_to(values, bias):
    made = torch.empty_strided(bias.shape, bias.stride(), dtype=bias.dtype, device=bias.device)
    return made.copy_(values.sum_to_size(bias.shape))


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, sums = forward(q, k, v, None, is_causal, scale)
    rng = number(q.device, 2, dtype=torch.uint64)
    empty = number(q.device, dtype=torch.uint64), q.new_empty(0)
    return out, sums.to(q.device), None, None, q.shape[2], k.shape[2], rng, *empty


def flash_backward(go, q, k, v, out, lse, cq, ck, mq, mk, dropout_p, causal, ps, po, *, scale=None):
    name = "_scaled_dot_product_flash_attention_backward"
    return backward(name, go, q, k, v, None, causal, scale, out, lse)[:3]


def cudnn(q, k, v, bias, lse, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    out, sums = forward(q, k, v, bias, is_causal, scale)
    numbers = number(q.device), number(q.device)
    return out, sums[..., None].to(q.device), None, None, q.shape[2], k.shape[2], *numbers, None


def cudnn_backward(
    go, q, k, v, out, lse, ps, po, bias, cq, ck, mq, mk, dropout_p, causal, *, scale=None
):
    name = "_scaled_dot_product_cudnn_attention_backward"
    return backward(name, go, q, k, v, bias, causal, scale, out, lse)[:3]


def install() -> torch.library.Library:
    """Register the kernels; they last as long as what is returned."""
    library = torch.library.Library("aten", "IMPL", "CUDA")
    kinds = {"efficient": (efficient, efficient_backward), "flash": (flash, flash_backward)}
    kinds["cudnn"] = (cudnn, cudnn_backward)
    for kind, (ahead, back) in kinds.items():
        library.impl(f"_scaled_dot_product_{kind}_attention", ahead, "CUDA")
        library.impl(f"_scaled_dot_product_{kind}_attention_backward", back, "CUDA")
    return library
