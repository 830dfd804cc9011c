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
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from strategies import initial
from strategies.activations.runners import surround
from strategies.base import BadInput
from strategies.parallel.tensor.products import head_norms, products, scale_sizes
from strategies.subject import Subject

# ---- shares of weights ----


@dataclass(frozen=True, kw_only=True)
class Share:
    """The ``index``-th of ``parts`` equal parts of a parameter of ``shape``, cut along ``axis``.

    ``pieces`` are the lengths of the matrices that lie one behind the other along the axis
    (queries, keys, values); empty: one. Each of them is cut, so a rank has all three of its own
    heads.

    Raises:
        BadInput: the axis cannot be cut into equal parts.
    """

    shape: torch.Size
    axis: int
    index: int
    parts: int
    pieces: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        length = self.shape[self.axis]
        if sum(self._pieces) != length or any(piece % self.parts for piece in self._pieces):
            raise BadInput(
                f"tp: a weight of {' x '.join(map(str, self.shape))} is not {self.parts} equal "
                f"parts along its {length}; take another ranks"
            )

    @property
    def _pieces(self) -> tuple[int, ...]:
        return self.pieces or (self.shape[self.axis],)

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start, offset, length) along the axis of each piece's part: ``start`` in the part,
        ``offset`` in the whole."""
        start = before = 0
        for piece in self._pieces:
            length = piece // self.parts
            yield start, before + self.index * length, length
            start, before = start + length, before + piece

    def part(self, whole: Tensor) -> Tensor:
        """Return this part of ``whole``: a view where one is possible."""
        mine = [whole.narrow(self.axis, offset, length) for _, offset, length in self._spans()]
        return torch.cat(mine, self.axis) if len(mine) > 1 else mine[0]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole parameter from the parts of all ranks, in rank order."""
        each = [
            part.narrow(self.axis, start, length)
            for start, _, length in self._spans()
            for part in parts
        ]
        return torch.cat(each, self.axis)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start, offset, numel) of each contiguous piece: ``start`` counts elements of the
        flattened part, ``offset`` those of the flattened whole."""
        behind = self.shape[self.axis + 1 :].numel()
        whole = self.shape[self.axis] * behind
        for row in range(self.shape[: self.axis].numel()):
            for start, offset, length in self._spans():
                mine = row * whole // self.parts + start * behind
                yield mine, row * whole + offset * behind, length * behind

    def boxes(self, first: int, rows: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Yield (start, length, offsets) of each box of the whole within ``rows`` rows of the part
        from row ``first`` on: ``start`` counts along the axis of these rows, ``offsets`` are in the
        whole."""
        offsets = [0] * len(self.shape)
        for start, offset, length in self._spans():
            if self.axis > 0:
                offsets[0], offsets[self.axis] = first, offset
                yield start, length, tuple(offsets)
                continue
            low, high = max(first, start), min(first + rows, start + length)
            if low < high:
                yield low - first, high - low, (offset + low - start, *offsets[1:])


def share_of(parameter: Any) -> Share | None:
    """Return the share that ``parameter`` is; None for a whole parameter."""
    return getattr(parameter, "share", None)


def shared_parameter(
    p: nn.Parameter, axis: int, index: int, parts: int, pieces: tuple[int, ...] = ()
) -> nn.Parameter:
    """Return a parameter that holds a ``Share`` of ``p``. A parameter without a value yet is drawn
    whole and then cut."""
    share = Share(shape=p.shape, axis=axis, index=index, parts=parts, pieces=pieces)

    def part(whole: Tensor) -> Tensor:
        # A view would keep the whole alive.
        return share.part(whole.detach()).clone(memory_format=torch.contiguous_format)

    if initial.pending(p) is None:
        new = nn.Parameter(part(p))
    else:
        with initial.valueless():
            new = nn.Parameter(part(p))
        initial.hand_on(p, new, like=p)
        initial.instead(new, part)
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


class Entry:
    """The last input of column-parallel layers, and its copy (``CopyToGroup``).

    Layers that take the same tensor (queries, keys and values) share the copy, so backward sums the
    gradient of the tensor once, as Megatron-LM's fused product does. A row-parallel layer ends it.
    """

    def __init__(self) -> None:
        self.x: Tensor | None = None
        self.copy: Tensor | None = None

    def copy_for(self, x: Tensor, group: Any) -> Tensor:
        """Return the copy of ``x``."""
        if self.copy is None or self.x is not x:
            self.x, self.copy = x, CopyToGroup.apply(x, group)
        return self.copy

    def end(self) -> None:
        """Release the input."""
        self.x = self.copy = None


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


class CopiesToGroup(torch.autograd.Function):
    """``CopyToGroup`` of several weights, with one sum of all their gradients."""

    @staticmethod
    def forward(ctx: Any, group: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        sums = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(sums, group=ctx.group)
        parts = sums.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad) for part, grad in zip(parts, grads, strict=True))


class OfOwnHeads:
    """Forward of an attention whose ``norms`` of a head have whole weights: their gradients are
    those of this rank's heads, so backward sums them. Megatron-LM does so after backward."""

    def __init__(self, attention: nn.Module, norms: list[nn.Module]) -> None:
        self.inner, self.norms, self.group = attention.forward, norms, None

    def _weights(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        named = ((norm, *pair) for norm in self.norms for pair in norm.named_parameters())
        return [(norm, name, p) for norm, name, p in named if p.requires_grad]

    @property
    def trained(self) -> bool:
        """True if backward has a sum."""
        return bool(self._weights())

    def __call__(self, *given: Any, **named: Any) -> Any:
        held = self._weights()
        copies = CopiesToGroup.apply(self.group, *(p for *_, p in held))
        for (norm, name, _), copy in zip(held, copies, strict=True):
            norm._parameters[name] = copy
        try:
            return self.inner(*given, **named)
        finally:
            for norm, name, p in held:
                norm._parameters[name] = p


class ParallelLinear(nn.Linear):
    """A linear layer that holds the ``index``-th of ``parts`` parts of ``whole``.

    ``in_features`` and ``out_features`` are those of the part. ``group`` has the ranks of the other
    parts, and ``entry`` is the model's; ``connect`` sets them.
    """

    axis: ClassVar[int]

    def __init__(self, whole: nn.Linear, index: int, parts: int, pieces: tuple[int, ...]) -> None:
        weight = shared_parameter(whole.weight, self.axis, index, parts, pieces)
        with initial.valueless():
            super().__init__(weight.shape[1], weight.shape[0], bias=False)
        self.weight, self.bias = weight, whole.bias
        self.group: Any = None
        self.entry = Entry()


class ColumnParallel(ParallelLinear):
    """[..., K] -> [..., F / P]: this rank's features of the product, of each of its pieces."""

    axis = 0

    def __init__(self, whole: nn.Linear, index: int, parts: int, pieces: tuple[int, ...]) -> None:
        super().__init__(whole, index, parts, pieces)
        if self.bias is not None:
            self.bias = shared_parameter(self.bias, 0, index, parts, pieces)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.entry.copy_for(x, self.group), self.weight, self.bias)


class RowParallel(ParallelLinear):
    """[..., K / P] -> [..., F]: the sum over ranks of the products of each rank's input."""

    axis = 1

    def forward(self, x: Tensor) -> Tensor:
        self.entry.end()  # first: a recomputation may stop within the product
        out = ReduceFromGroup.apply(F.linear(x, self.weight), self.group)
        # After the sum: a bias in each product would be added once a rank.
        return out if self.bias is None else out.add_(self.bias.to(out.dtype))


def cut_block(block: Any, index: int, parts: int, *, by_tokens: bool = False) -> None:
    """Replace the linear layers of a block that ``products`` finds by the ``index``-th of ``parts``
    parts: whole heads, and inner features of the MLP. Norms and modulation stay whole.
    ``by_tokens``: between the halves each rank is to have its stripe of the tokens."""
    kinds = (StripeColumnParallel, StripeRowParallel) if by_tokens else WHOLE
    for name, cut in products(block).items():
        whole = block.get_submodule(name)
        block.set_submodule(name, kinds[cut.axis](whole, index, parts, cut.pieces))
    scale_sizes(block, lambda size: size // parts)
    for attention, norms in head_norms(block).items():
        attention.forward = OfOwnHeads(attention, norms)


WHOLE = (ColumnParallel, RowParallel)


def connect(module: nn.Module, group: Any) -> None:
    """Give all cut layers of ``module`` the ``group`` of the ranks with the other parts."""
    entry = Entry()
    for layer in parallel_layers(module):
        layer.group, layer.entry = group, entry
    for attention in per_head(module):
        attention.forward.group = group


def per_head(module: nn.Module) -> list[Any]:
    """Return all attentions of ``module`` with whole weights that work on this rank's heads."""
    return [part for part in module.modules() if isinstance(part.forward, OfOwnHeads)]


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
    return any(isinstance(layer, StripeColumnParallel) for layer in parallel_layers(block))


def spread(out: Tensor, group: Any) -> Tensor:
    """Return a block's modulation ``out``; backward sums its gradients over the group."""
    return CopyToGroup.apply(out, group)
