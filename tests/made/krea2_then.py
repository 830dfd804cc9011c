"""Krea 2 as the trainers of public rows ran it, where this project's diffusers differs.

``grouped``: attention takes a key head for four query heads, and torch computes it by plain
products, because no other kernel takes such heads with a mask on that card. Source: diffusers
0.39.0, transformer_krea2.py; pull request 14523 repeats the keys since. OpenChar keeps the norms'
weights in float32 (15f003a, models/loaders.py, load_krea2_transformer), so that each is one kernel.

``fused``: queries, keys and values are one product beside the three layers that it was made of,
which stay on the device. cuDNN computes attention. Source: SimpleTuner 363fbc3,
helpers/models/krea2/transformer.py (fuse_projections) and its example's attention_mechanism.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from harness.planner import overhead
from strategies.adapters import coded


def _attended(layer: Any, x: Tensor, mask: Tensor | None = None, turns: Any = None) -> Tensor:
    """Attention of Krea 2 with a key head for several query heads: x [B, T, D] -> [B, T, D]."""
    from diffusers.models.embeddings import apply_rotary_emb

    width, heads, fewer = layer.head_dim, layer.num_heads, layer.num_kv_heads
    if "to_qkv" in layer._modules:
        q, k, v = layer.to_qkv(x).split([width * heads, width * fewer, width * fewer], dim=-1)
    else:
        q, k, v = layer.to_q(x), layer.to_k(x), layer.to_v(x)
    gate = layer.to_gate(x)
    q, k, v = (part.unflatten(-1, (-1, width)) for part in (q, k, v))
    q, k = layer.norm_q(q), layer.norm_k(k)
    if turns is not None:
        q, k = (apply_rotary_emb(part, turns, sequence_dim=1) for part in (q, k))
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=heads != fewer
    )
    return layer.to_out[0](out.transpose(1, 2).flatten(2) * torch.sigmoid(gate))


@contextlib.contextmanager
def grouped() -> Iterator[None]:
    """Attention of diffusers 0.39.0, and norms of float32 weights."""
    from diffusers.models.transformers import transformer_krea2 as model

    def call(
        _: Any, attn: Any, hidden_states: Tensor, attention_mask: Any = None,
        image_rotary_emb: Any = None,
    ) -> Tensor:  # fmt: skip
        return _attended(attn, hidden_states, attention_mask, image_rotary_emb)

    def norm(self: Any, x: Tensor) -> Tensor:
        weight = self.weight.float() + 1.0
        return nn.functional.rms_norm(x.float(), (self.dim,), weight, self.eps).to(x.dtype)

    with (
        mock.patch.object(model.Krea2AttnProcessor, "__call__", call),
        mock.patch.object(model.Krea2RMSNorm, "forward", norm),
    ):
        yield


@contextlib.contextmanager
def fused() -> Iterator[None]:
    """SimpleTuner's fused projections, beside their parts, and cuDNN's attention."""
    from diffusers.models.transformers import transformer_krea2 as model

    begin = model.Krea2Attention.__init__

    def init(self: Any, *given: Any, **more: Any) -> None:
        begin(self, *given, **more)
        features = self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        self.to_qkv = nn.Linear(self.hidden_size, features, bias=False)

    def call(
        _: Any, attn: Any, hidden_states: Tensor, attention_mask: Any = None,
        image_rotary_emb: Any = None,
    ) -> Tensor:  # fmt: skip
        return _attended(attn, hidden_states, attention_mask, image_rotary_emb)

    with (
        mock.patch.object(overhead, "choose", lambda *given: "cudnn"),
        mock.patch.object(model.Krea2Attention, "__init__", init),
        mock.patch.object(model.Krea2AttnProcessor, "__call__", call),
    ):
        yield


class _Trained(torch.autograd.Function):
    """A product with int8 weights that keeps its input, and computes the weight's gradient.

    Source: torchao 0.17, prototype/quantized_training/int8.py (_Int8WeightOnlyLinear).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Any, to: str) -> Tensor:
        ctx.save_for_backward(x, codes)
        ctx.scale = scale.flatten().to(x.dtype)
        out = nn.functional.linear(x, codes.view(torch.int8).to(x.dtype)) * ctx.scale
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, codes = ctx.saved_tensors
        dx = (gradient * ctx.scale) @ codes.view(torch.int8).to(gradient.dtype)
        weight = gradient.flatten(0, -2).T @ x.flatten(0, -2)  # made, and given to nobody
        del weight
        return dx, None, None, None, None


@contextlib.contextmanager
def torchao_int8() -> Iterator[None]:
    """Products with int8 weights as torchao's quantized training has them."""
    with mock.patch.object(coded, "Product", _Trained):
        yield


ATTENTION = {"grouped": grouped, "fused": fused}
"""Word of a row's key ``attention`` -> what the trainer's model did."""
