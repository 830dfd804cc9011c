"""Attention over the tokens of all ranks that share a sample, and its installation in a model.

The libraries' versions were tried with gloo and do not serve. torch 2.13's ``context_parallel``:
"aten._scaled_dot_product_flash_attention_for_cpu_backward.default does not have a sharding strategy
registered". diffusers 0.42.1's ``enable_parallelism``: "ZeroDivisionError: integer modulo by zero"
(it counts GPUs). With a GPU counted, its plans of Qwen-Image, Flux and Wan train. But each rank
computes the whole loss, so its gradients must be summed: an engine that averages them halves those
of two ranks. HunyuanVideo has no plan ("`cp_plan` must be provided"). accelerate 1.15's
``ParallelismConfig(cp_size=2)``: "only compatible DistributedType.FSDP (version 2) or
DistributedType.Multi{Device} or DistributedType.DEEPSPEED, but got DistributedType.MULTI_CPU".

Each rank's gradients are those of its own part of the loss. An engine that averages gradients over
all ranks therefore has those of the whole batch.

A model's attention is replaced at the attribute ``attend`` if it has one, else torch's attention is
intercepted while the blocks run. Attention to a text that all ranks have whole exchanges nothing:
its keys are not as many as its queries.

Shape suffixes: B batch, N heads, T tokens, K head size; P ranks of the group. Imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from strategies.activations.runners import runner_of, surround
from strategies.engine import TrainingRun
from strategies.subject import Subject

Attended = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS, TOKENS = 1, 2
"""Axes of queries, keys and values [B, N, T, K]."""
aten = torch.ops.aten


class Around:
    """Replaces an attention (``inner``) so that it sees the tokens of ``group``.

    ``forward_collectives`` and ``backward_collectives`` count a rank's sends. ``cut`` names the
    axes of attention of which a rank has a part ("heads", "queries", "keys").
    """

    forward_collectives: ClassVar[int]
    backward_collectives: ClassVar[int]
    cut: ClassVar[frozenset[str]]

    def __init__(self, inner: Attended, group: Any) -> None:
        self.inner, self.group = inner, group


def kind(how: str, ranks: int) -> type[Around]:
    """Return the kind of ``Around`` that a recipe names by ``how``, for ``ranks`` ranks."""
    if how == "ring":
        # Keys and values move ranks - 1 times; in backward their gradients move every time.
        counts = {"forward_collectives": ranks - 1, "backward_collectives": 2 * ranks - 1}
        return type("Ring", (Ring,), counts)
    return Ulysses if how == "ulysses" else Gathered


# ---- Ulysses, and gathered keys and values ----


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


class Gather(torch.autograd.Function):
    """Join all ranks' ``x`` along the tokens; backward gives each rank the sum of all gradients of
    its own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        mine = x.contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        return torch.cat(parts, TOKENS)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        sent = torch.stack(grad.chunk(dist.get_world_size(ctx.group), TOKENS))
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=ctx.group)
        return got.sum(0), None


class Ulysses(Around):
    """All tokens of a share of the heads: q, k, v [B, N, T/P, K] -> [B, N/P, T, K], attention, and
    back again. Source: Jacobs et al. 2023 (arXiv:2309.14509)."""

    forward_collectives, backward_collectives, cut = 4, 4, frozenset({"heads"})

    def __call__(self, q_BNTK: Tensor, k_BNTK: Tensor, v_BNTK: Tensor) -> Tensor:
        whole = (Exchange.apply(x, self.group, HEADS, TOKENS) for x in (q_BNTK, k_BNTK, v_BNTK))
        return Exchange.apply(self.inner(*whole), self.group, TOKENS, HEADS)


class Gathered(Around):
    """Keys and values of all tokens, queries of this rank's: works for any number of heads."""

    forward_collectives, backward_collectives, cut = 2, 2, frozenset({"queries"})

    def __call__(self, q_BNTK: Tensor, k_BNTK: Tensor, v_BNTK: Tensor) -> Tensor:
        keys, values = (Gather.apply(x, self.group) for x in (k_BNTK, v_BNTK))
        return self.inner(q_BNTK, keys, values)


# ---- ring ----


class Ring(Around):
    """Keys and values move from rank to rank, one part at a time; a rank has at most two parts.

    Each part's attention is merged by the logarithm of the sum in its softmax, as torch's ring does
    (``_SDPAMerger``), whose kernels are those of GPUs alone. The kernel is torch's flash attention,
    which returns that logarithm, whatever ``inner`` is. Source: Liu et al. 2023 (arXiv:2310.01889).
    """

    cut = frozenset({"queries", "keys"})

    def __call__(self, q_BNTK: Tensor, k_BNTK: Tensor, v_BNTK: Tensor) -> Tensor:
        return Round.apply(q_BNTK, k_BNTK, v_BNTK, self.group)


def _passed(x: Tensor, group: Any) -> Callable[[], Tensor]:
    """Send ``x`` to the next rank. Returns a function that waits for the previous rank's tensor, so
    computation can overlap with it."""
    rank, size, got = group.rank(), group.size(), torch.empty_like(x)
    to, of = (rank + 1) % size, (rank - 1) % size
    if x.is_cuda:  # NCCL overlaps a send and a receive only if it is given both together
        send = dist.P2POp(dist.isend, x, group=group, group_peer=to)
        works = dist.batch_isend_irecv(
            [send, dist.P2POp(dist.irecv, got, group=group, group_peer=of)]
        )
    else:
        works = [
            dist.isend(x, group=group, group_dst=to),
            dist.irecv(got, group=group, group_src=of),
        ]

    def taken() -> Tensor:
        for work in works:
            work.wait()
        return got

    taken.sent = x  # type: ignore[attr-defined]  # it must live until it is sent
    return taken


def _attended(q_BNTK: Tensor, k_BNTK: Tensor, v_BNTK: Tensor) -> tuple[Tensor, Tensor, list[Any]]:
    """Return attention, the logarithm of the sum in its softmax [B, N, T], and the further values
    that backward needs."""
    if q_BNTK.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q_BNTK, k_BNTK, v_BNTK)
        return out, lse, []
    found = aten._scaled_dot_product_flash_attention(q_BNTK, k_BNTK, v_BNTK)
    out, lse, *rest = found
    return out, lse, rest[:6]


def _differentiated(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: list[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, from the output and the logarithm over all parts."""
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse, 0.0, False)
    cum_q, cum_k, max_q, max_k, seed, offset = rest
    backward = aten._scaled_dot_product_flash_attention_backward
    return backward(grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, False, seed, offset)


class Round(torch.autograd.Function):
    """Attention of this rank's queries to the keys and values of all ranks of ``group``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        pair: Any = torch.stack([k, v])
        merged: Any = None
        for left in reversed(range(group.size())):
            coming = _passed(pair, group) if left else None
            out, lse, ctx.rest = _attended(q, *pair)
            merged = _merged(merged, out.float(), lse.unsqueeze(-1))
            pair = coming() if coming else pair
        whole, sums = merged[0].to(q.dtype), merged[1].squeeze(-1)
        ctx.save_for_backward(q, k, v, whole, sums)
        ctx.group = group
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        pair: Any = torch.stack([k, v])
        of_q = torch.zeros_like(q, dtype=torch.float32)
        home: Any = None
        for left in reversed(range(ctx.group.size())):
            coming = _passed(pair, ctx.group) if left else None
            mine, *of_pair = _differentiated(grad, q, pair[0], pair[1], out, lse, ctx.rest)
            of_q += mine
            so_far = torch.stack(of_pair).float()
            # Gradients travel with their part, and after the last round to its owner.
            home = _passed(so_far if home is None else so_far.add_(home()), ctx.group)
            pair = coming() if coming else pair
        of_k, of_v = home().to(k.dtype)
        return of_q.to(q.dtype), of_k, of_v, None


def _merged(
    so_far: tuple[Tensor, Tensor] | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    if so_far is None:
        return out, lse
    whole, sums = so_far
    return whole - (lse - sums).sigmoid() * (whole - out), sums - F.logsigmoid(sums - lse)


MASK = "uint8"
"""Type in which masks travel."""


def joined_mask(mask_B11T: Tensor, group: Any) -> Tensor:
    """Join all ranks' masks of keys, in rank order; True are keys that are seen."""
    mine = mask_B11T.to(torch.uint8).contiguous()
    parts = mine.new_empty((group.size() * len(mine), *mine.shape[1:]))
    dist.all_gather_into_tensor(parts, mine, group=group)
    return torch.cat(parts.chunk(group.size()), -1).to(mask_B11T.dtype)


# ---- installation in a model ----

Way = partial[Callable[..., Any]]
"""Makes an ``Around`` of an attention; its group is given."""


class Exchanging:
    """A runner of blocks within which torch's attention sees the tokens of the whole group; without
    a ``way`` it changes nothing."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.way: Way | None = None

    def __call__(self, blocks: Any, *given: Any, **named: Any) -> Any:
        if self.way is None:
            return self.inner(blocks, *given, **named)
        with _Intercept(self.way):
            return self.inner(blocks, *given, **named)


class _Intercept(TorchFunctionMode):
    """Puts ``way`` around torch's attention. A mask of keys is joined as the keys are."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way

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
        if mask is not None:
            rest["attn_mask"] = joined_mask(mask, self.way.keywords["group"])
        return self.way(lambda q, k, v: func(q, k, v, **rest))(query, key, value)


def install(module: Any, subject: Subject) -> None:
    """Prepare a model without ``attend``. Called before its blocks are wrapped to be recomputed, so
    that recomputed blocks exchange again."""
    if "attend" not in subject.parts:
        surround(module, subject, Exchanging)


def connect(module: Any, subject: Subject, way: Way) -> None:
    """Let attention see the tokens of the group from now on."""
    if "attend" not in subject.parts:
        runner_of(module, Exchanging).way = way
        return
    for layer in subject.attentions(module):
        layer.attend = way(layer.attend)


def keep_to_own(module: Any, subject: Subject) -> None:
    """Let attention see only this rank's tokens from now on."""
    if "attend" not in subject.parts:
        runner_of(module, Exchanging).way = None
        return
    for layer in subject.attentions(module):
        layer.attend = layer.attend.inner if isinstance(layer.attend, Around) else layer.attend


@contextlib.contextmanager
def alone(module: Any, subject: Subject) -> Iterator[None]:
    """``keep_to_own`` within the context."""
    layers = subject.attentions(module) if "attend" in subject.parts else []
    runner = runner_of(module, Exchanging)
    kept, way = [layer.attend for layer in layers], runner and runner.way
    keep_to_own(module, subject)
    try:
        yield
    finally:
        for layer, attend in zip(layers, kept, strict=True):
            layer.attend = attend
        if runner is not None:
            runner.way = way


# ---- whole outputs, for drawing samples ----

JOIN = "_allgather_base_"
"""torch's name of the collective by which ``join`` gathers."""
Indices = dict[tuple[int, ...], list[Tensor]]
"""Shape of one sample's output -> flat index of each part's elements in it."""


def join(trained: TrainingRun, part: Tensor, samples: Tensor, known: Indices) -> Tensor:
    """Gather the output for whole ``samples`` [B, C, ...] from this rank's ``part`` [B, ...] of it
    (``Subject.cut``); all ranks call it and get the same. The output may have other channels than
    the samples (learned variance). ``known`` caches indices between calls."""
    parts = trained.launch.layout.sequence
    got = part.new_empty((parts * len(part), *part.shape[1:]))
    dist.all_gather_into_tensor(got, part.contiguous())
    whole = part.new_empty((len(part), part.shape[1], *samples.shape[2:]))
    shape = tuple(whole.shape[1:])
    if shape not in known:
        # The subject cuts numbered elements: so it tells their order, however it cuts.
        numbers = torch.arange(whole[0].numel(), device=part.device).view(1, *shape)
        known[shape] = [trained.subject.cut(numbers, i, parts).flatten() for i in range(parts)]
    for indices, each in zip(known[shape], got.chunk(parts), strict=True):
        whole.flatten(1).index_copy_(1, indices, each.flatten(1))
    return whole
