"""Column- and row-parallel linear layers, and the shares of weights that ranks hold.

torch 2.13's ``parallelize_module`` (DTensor) was tried with gloo: same losses, same peak. DDP fails
on its parameters ("aten.cat.default got mixed torch.Tensor and DTensor"); so do AdamW's foreach and
fused kernels. On 2 CPU processes its step takes 2.1 times the processor time of these layers
for DiT-T/8 (42 against 21 ms) and 1.15 times for DiT-S/8 (264 against 230 ms). accelerate 1.15's
``ParallelismConfig(tp_size=2)`` refuses MULTI_CPU.

The first layer of a half of a block is column-parallel, the second row-parallel, so only sums of
the second are exchanged. Source: Shoeybi et al. 2019, Megatron-LM (arXiv:1909.08053), whose f and g
are ``CopyToGroup`` and ``ReduceFromGroup``. With ``norms=tokens`` each rank has a stripe of the
tokens between the halves. Source: Korthikanti et al. 2022, Reducing Activation Recomputation
(arXiv:2205.05198), whose g and g-bar are ``GatheredLinear`` and ``ScatteredSum``.

Shape suffixes: B batch, T tokens, D hidden size, K input and F output features; P ranks of the
group. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from strategies import initial
from strategies.activations.runners import surround
from strategies.base import BadInput
from strategies.subject import Subject

LAYERS = {"attn.qkv": 0, "attn.proj": 1, "mlp.fc1": 0, "mlp.fc2": 1}
"""Name of each layer of a block that is cut -> axis of its weight along which it is cut."""
PACKED = 3
"""Matrices that ``attn.qkv`` holds one behind the other: queries, keys and values."""


# ---- shares of weights ----


@dataclass(frozen=True, kw_only=True)
class Share:
    """The ``index``-th of ``parts`` equal parts of a parameter of ``shape``, cut along ``axis``.

    ``packed`` matrices lie one behind the other along the axis (queries, keys, values). Each of
    them is cut, so a rank has all three of its own heads.

    Raises:
        BadInput: the axis cannot be cut into equal parts.
    """

    shape: torch.Size
    axis: int
    index: int
    parts: int
    packed: int = 1

    def __post_init__(self) -> None:
        length = self.shape[self.axis]
        if length % (self.parts * self.packed):
            raise BadInput(
                f"tp: a weight of {' x '.join(map(str, self.shape))} is not {self.parts} equal "
                f"parts along its {length}; take another ranks"
            )

    def part(self, whole: Tensor) -> Tensor:
        """Return this part of ``whole``: a view where one is possible."""
        dealt = whole.unflatten(self.axis, (self.packed, self.parts, -1))
        return dealt.select(self.axis + 1, self.index).flatten(self.axis, self.axis + 1)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole parameter from the parts of all ranks, in rank order."""
        each = [part.unflatten(self.axis, (self.packed, -1)) for part in parts]
        return torch.stack(each, self.axis + 1).flatten(self.axis, self.axis + 2)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start, offset, numel) of each contiguous piece: ``start`` counts elements of the
        flattened part, ``offset`` those of the flattened whole."""
        rows = self.shape[: self.axis].numel() * self.packed
        numel = self.shape.numel() // (rows * self.parts)
        for row in range(rows):
            yield row * numel, (row * self.parts + self.index) * numel, numel

    def boxes(self, first: int, rows: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Yield (start, rows, offsets) of each box of the whole within ``rows`` rows of the part
        from row ``first`` on: ``start`` counts from ``first``, ``offsets`` are in the whole."""
        offsets = [0] * len(self.shape)
        if self.axis > 0:
            offsets[self.axis] = self.shape[self.axis] // self.parts * self.index
            yield 0, rows, (first, *offsets[1:])
            return
        length = self.shape[0] // (self.parts * self.packed)
        for block in range(self.packed):
            low, high = max(first, block * length), min(first + rows, (block + 1) * length)
            if low < high:
                there = (block * (self.parts - 1) + self.index) * length + low
                yield low - first, high - low, (there, *offsets[1:])


def share_of(parameter: Any) -> Share | None:
    """Return the share that ``parameter`` is; None for a whole parameter."""
    return getattr(parameter, "share", None)


def shared_parameter(
    p: nn.Parameter, axis: int, index: int, parts: int, packed: int = 1
) -> nn.Parameter:
    """Return a parameter that holds a ``Share`` of ``p``. A parameter without a value yet is drawn
    whole and then cut."""
    share = Share(shape=p.shape, axis=axis, index=index, parts=parts, packed=packed)

    def kept(whole: Tensor) -> nn.Parameter:
        # A view would keep the whole alive.
        return nn.Parameter(share.part(whole.detach()).clone(memory_format=torch.contiguous_format))

    if initial.pending(p) is None:
        new = kept(p)
    else:
        with initial.valueless():
            new = kept(p)
        initial.hand_on(p, new, kept, like=p)
    new.requires_grad_(p.requires_grad)
    new.share = share
    return new


# ---- layers ----


class CopyToGroup(torch.autograd.Function):
    """Return ``x``, which all ranks have; backward sums its gradients over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # In place: this gradient of the product's input has no other reader.
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromGroup(torch.autograd.Function):
    """Sum ``x`` over the group, in place; backward returns the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


class ParallelLinear(nn.Linear):
    """A linear layer that holds the ``index``-th of ``parts`` parts of ``whole``.

    ``in_features`` and ``out_features`` are those of the part. ``group`` has the ranks of the other
    parts; ``TensorParallel.configure`` sets it.
    """

    def __init__(self, whole: nn.Linear, index: int, parts: int, axis: int, packed: int) -> None:
        weight = shared_parameter(whole.weight, axis, index, parts, packed)
        with initial.valueless():
            super().__init__(weight.shape[1], weight.shape[0], bias=False)
        self.weight, self.bias = weight, whole.bias
        self.group: Any = None


class ColumnParallel(ParallelLinear):
    """[..., K] -> [..., F / P]: this rank's features of the product, of each packed matrix."""

    def __init__(self, whole: nn.Linear, index: int, parts: int, packed: int = 1) -> None:
        super().__init__(whole, index, parts, 0, packed)
        if self.bias is not None:
            self.bias = shared_parameter(self.bias, 0, index, parts, packed)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(CopyToGroup.apply(x, self.group), self.weight, self.bias)


class RowParallel(ParallelLinear):
    """[..., K / P] -> [..., F]: the sum over ranks of the products of each rank's input."""

    def __init__(self, whole: nn.Linear, index: int, parts: int) -> None:
        super().__init__(whole, index, parts, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = ReduceFromGroup.apply(F.linear(x, self.weight), self.group)
        # After the sum: a bias in each product would be added once a rank.
        return out if self.bias is None else out.add_(self.bias.to(out.dtype))


def cut_block(block: Any, index: int, parts: int, *, by_tokens: bool = False) -> None:
    """Replace the linear layers of a block of the part "halves" by the ``index``-th of ``parts``
    parts: whole heads, and inner features of the MLP. Norms and modulation stay whole.
    ``by_tokens``: between the halves each rank is to have its stripe of the tokens."""
    first, last = (StripeColumnParallel, StripeRowParallel) if by_tokens else WHOLE
    attn, mlp = block.attn, block.mlp
    attn.qkv = first(attn.qkv, index, parts, PACKED)
    attn.proj = last(attn.proj, index, parts)
    attn.num_heads //= parts
    mlp.fc1 = first(mlp.fc1, index, parts)
    mlp.fc2 = last(mlp.fc2, index, parts)


WHOLE = (ColumnParallel, RowParallel)


def parallel_layers(module: nn.Module) -> list[ParallelLinear]:
    """Return all layers of ``module`` that are cut."""
    return [layer for layer in module.modules() if isinstance(layer, ParallelLinear)]


# ---- stripes of tokens between the halves (norms=tokens) ----


def own_tokens(x_BTD: Tensor, group: Any) -> Tensor:
    """Return this rank's stripe of the tokens [B, T / P, D]: a copy, because a view would keep all
    tokens alive."""
    return x_BTD.chunk(group.size(), 1)[group.rank()].contiguous()


def all_tokens(x_BTD: Tensor, group: Any) -> Tensor:
    """Gather the stripes of all ranks, in rank order."""
    batch, *rest = x_BTD.shape
    parts = x_BTD.new_empty(group.size() * batch, *rest)
    dist.all_gather_into_tensor(parts, x_BTD.contiguous(), group=group)
    return parts.unflatten(0, (-1, batch)).movedim(0, 1).flatten(1, 2)


def summed_own(x_BTD: Tensor, group: Any) -> Tensor:
    """Return this rank's stripe of the sum of all ranks' ``x_BTD``."""
    parts = x_BTD.unflatten(1, (group.size(), -1)).movedim(1, 0).flatten(0, 1)
    mine = torch.empty_like(parts[: len(x_BTD)])
    dist.reduce_scatter_tensor(mine, parts, group=group)
    return mine


class ToStripe(torch.autograd.Function):
    """All tokens, alike on all ranks -> this rank's stripe."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return own_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return all_tokens(grad, ctx.group), None


class FromStripes(torch.autograd.Function):
    """This rank's stripe -> all tokens, alike on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return all_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return own_tokens(grad, ctx.group), None


class GatheredLinear(torch.autograd.Function):
    """The product of all tokens. Only this rank's stripe is kept; backward gathers it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Any) -> Tensor:
        ctx.group, ctx.biased = group, bias is not None
        ctx.save_for_backward(x, weight)
        return F.linear(all_tokens(x, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        of_input = summed_own(grad @ weight, ctx.group)
        rows = grad.flatten(0, 1)
        of_weight = rows.T @ all_tokens(x, ctx.group).flatten(0, 1)
        return of_input, of_weight, rows.sum(0) if ctx.biased else None, None


class ScatteredSum(torch.autograd.Function):
    """This rank's stripe of the sum of all ranks' products, plus the bias. The bias's gradient is
    of all tokens, which backward gathers anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, group: Any) -> Tensor:
        ctx.group, ctx.biased = group, bias is not None
        out = summed_own(x, group)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad = all_tokens(grad, ctx.group)
        return grad, grad.flatten(0, 1).sum(0) if ctx.biased else None, None


class StripeColumnParallel(ColumnParallel):
    """[B, T / P, K] -> [B, T, F / P]."""

    def forward(self, x: Tensor) -> Tensor:
        # Autocast does not reach into a Function. A traced GPU tensor has no CUDA device type.
        kind = "cpu" if x.device.type == "cpu" else "cuda"
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return GatheredLinear.apply(x.to(dtype), self.weight.to(dtype), bias, self.group)


class StripeRowParallel(RowParallel):
    """[B, T, K / P] -> [B, T / P, F]."""

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight)
        bias = None if self.bias is None else self.bias.to(out.dtype)
        return ScatteredSum.apply(out, bias, self.group)


class OnStripes:
    """A runner of blocks: ``inner`` on this rank's stripe of the tokens."""

    def __init__(self, inner: Any, group: Any) -> None:
        self.inner, self.group = inner, group

    def __call__(self, blocks: Any, x_BTD: Tensor, *given: Any, **named: Any) -> Tensor:
        own = ToStripe.apply(x_BTD, self.group)
        return FromStripes.apply(self.inner(blocks, own, *given, **named), self.group)


def run_on_stripes(module: nn.Module, subject: Subject, group: Any) -> None:
    """Run the blocks of ``module``, cut ``by_tokens``, on stripes of the tokens. Called after the
    runners that recompute blocks are installed, so that they keep stripes too."""
    surround(module, subject, lambda inner: OnStripes(inner, group))
    for block in subject.blocks(module):
        # Each rank's gradients of shift, scale and gate are those of its own tokens.
        block.adaLN_modulation.register_forward_hook(lambda layer, given, out: spread(out, group))


def has_stripe(block: Any) -> bool:
    """Return True if ``block`` is given this rank's stripe of the tokens."""
    return isinstance(block.attn.qkv, StripeColumnParallel)


def spread(out: Tensor, group: Any) -> Tensor:
    """Return a block's modulation ``out``; backward sums its gradients over the group."""
    return CopyToGroup.apply(out, group)
