"""Ulysses: attention over the tokens of all ranks that share a sample (arXiv:2309.14509).

The libraries' versions were tried with gloo and do not serve. torch 2.13's ``context_parallel``:
"aten._scaled_dot_product_flash_attention_for_cpu_backward.default does not have a sharding strategy
registered". diffusers 0.42.1's ``enable_parallelism``: "ZeroDivisionError: integer modulo by zero"
(it counts GPUs). accelerate 1.15's ``ParallelismConfig(cp_size=2)``: "only compatible
DistributedType.FSDP (version 2) or DistributedType.Multi{Device} or DistributedType.DEEPSPEED, but
got DistributedType.MULTI_CPU".

Each rank's gradients are those of its own part of the loss. An engine that averages gradients over
all ranks therefore has those of the whole batch.

A model's attention is replaced at the attribute ``attend`` if it has one, else torch's attention is
intercepted while the blocks run. Attention to a text that all ranks have whole exchanges nothing:
its keys are not as many as its queries.

Shape suffixes: B batch, N heads, T tokens, K head size; P ranks of the group. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from strategies.activations.runners import runner_of, surround
from strategies.subject import Subject, attentions

Attended = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS, TOKENS = 1, 2
"""Axes of queries, keys and values [B, N, T, K]."""
COLLECTIVES = 4
"""All-to-alls around one attention in forward, and as many in backward: q, k, v and the output."""


def exchanged(x: Tensor, group: Any, cut: int, joined: int) -> Tensor:
    """Cut ``x`` along axis ``cut``, send each rank its part, and join the received parts along axis
    ``joined``, in rank order."""
    sent = torch.stack(x.chunk(dist.get_world_size(group), cut))
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    del sent
    return torch.cat(got.unbind(0), joined)


class Exchange(torch.autograd.Function):
    """``exchanged``; backward sends each part back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, cut: int, joined: int) -> Tensor:
        ctx.group, ctx.axes = group, (cut, joined)
        return exchanged(x, group, cut, joined)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        cut, joined = ctx.axes
        return exchanged(grad, ctx.group, joined, cut), None, None, None


class Ulysses:
    """Replaces an attention (``inner``) by one over all tokens, for a share of the heads.

    q, k, v [B, N, T/P, K] -> [B, N/P, T, K], attention, and back again.
    """

    def __init__(self, inner: Attended, group: Any) -> None:
        self.inner, self.group = inner, group

    def __call__(self, q_BNTK: Tensor, k_BNTK: Tensor, v_BNTK: Tensor) -> Tensor:
        whole = (Exchange.apply(x, self.group, HEADS, TOKENS) for x in (q_BNTK, k_BNTK, v_BNTK))
        return Exchange.apply(self.inner(*whole), self.group, TOKENS, HEADS)


# ---- installation in a model ----


class Exchanging:
    """A runner of blocks within which torch's attention is ``Ulysses`` over ``group``; without a
    group it changes nothing."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.group: Any = None

    def __call__(self, blocks: Any, *given: Any, **named: Any) -> Any:
        if self.group is None:
            return self.inner(blocks, *given, **named)
        with _Intercept(self.group):
            return self.inner(blocks, *given, **named)


class _Intercept(TorchFunctionMode):
    """Puts ``Ulysses`` around torch's attention. A mask of keys is joined as the keys are."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **named)
        names = ("query", "key", "value")
        given = list(args) + [named[name] for name in names[len(args) :]]
        query, key, value, *more = given
        if query.shape[-2] != key.shape[-2]:
            return func(*args, **named)
        rest = {k: v for k, v in named.items() if k not in names}
        mask = rest.get("attn_mask")
        if more or (mask is not None and (mask.shape[-2] > 1 or mask.dtype != torch.bool)):
            raise NotImplementedError("a mask is of whole samples: attention with one is not cut")
        if mask is not None:  # [B, 1, 1, T/P] -> [B, 1, 1, T]; True are keys that are seen
            mine = mask.to(torch.uint8).contiguous()
            parts = mine.new_empty((self.group.size() * len(mine), *mine.shape[1:]))
            dist.all_gather_into_tensor(parts, mine, group=self.group)
            rest["attn_mask"] = torch.cat(parts.chunk(self.group.size()), -1).to(mask.dtype)
        return Ulysses(lambda q, k, v: func(q, k, v, **rest), self.group)(query, key, value)


def install(module: Any, subject: Subject) -> None:
    """Prepare a model without ``attend``. Called before its blocks are wrapped to be recomputed, so
    that recomputed blocks exchange again."""
    if "attend" not in subject.parts:
        surround(module, subject, Exchanging)


def connect(module: Any, subject: Subject, group: Any) -> None:
    """Let attention see the tokens of ``group`` from now on."""
    if "attend" not in subject.parts:
        runner_of(module, Exchanging).group = group
        return
    for layer in attentions(module):
        layer.attend = Ulysses(layer.attend, group)
