"""Blocks cut by torch (``parallelize_module``) after a plan, and the whole of the cut weights.

``fully_shard`` comes after it, so that a cut weight is a DTensor on two axes of a mesh: rows among
the ranks that share a part, and its part. A layer that holds several matrices (packed queries, keys
and values) is in the order of the ranks: each has its share of every one, side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from strategies.inventory import Piece

AXIS = "tp"
"""Name of the mesh's axis among whose ranks weights are cut, as accelerate names it."""
HALVES = {"attn.qkv": (0, 3), "attn.proj": (1, 1), "mlp.fc1": (0, 1), "mlp.fc2": (1, 1)}
"""Layer of a block with the part "halves" -> axis of its weight that is cut, and its pieces."""
HEADS = ("heads", "num_heads")
"""Attributes of an attention that count its heads."""
SIZES = (*HEADS, "num_kv_heads", "inner_dim", "inner_kv_dim", "mlp_hidden_dim")
"""Attributes of an attention that a rank has a part of."""


class Cut(NamedTuple):
    """Cut of a layer's weight: along ``axis`` 0 of a first layer of an attention or an MLP, and 1
    of a last one. ``pieces``: lengths along it, each of which is cut."""

    axis: int
    pieces: tuple[int, ...]


Cuts = Mapping[str, Cut]
"""Name of a layer within its block -> cut."""


def plan(module: nn.Module, blocks: Sequence[nn.Module]) -> list[Cuts]:
    """Return the layers of each block that are cut: by the plan of a model of diffusers
    (``_tp_plan``), or by the names of a block of ``HALVES``."""
    library = getattr(type(module), "_tp_plan", None)
    names = {part: f"{name}." for name, part in module.named_modules()}
    cuts: dict[str, Cut] = {}
    if library:
        from diffusers.hooks.tensor_parallel import resolve_tp_shard_specs

        for name, spec in resolve_tp_shard_specs(module, library, 1).items():
            if name.endswith(".weight"):
                cuts[name.removesuffix(".weight")] = Cut(spec.dim, tuple(spec.block_sizes))
    for block in () if library else blocks:
        for name, (axis, count) in HALVES.items():
            size = block.get_submodule(name).weight.shape[axis] // count
            cuts[names[block] + name] = Cut(axis, (size,) * count)
    inner = [[name for name, _ in block.named_modules()] for block in blocks]
    return [
        {name: cuts[names[block] + name] for name in own if names[block] + name in cuts}
        for block, own in zip(blocks, inner, strict=True)
    ]


def attentions(block: nn.Module, cuts: Cuts) -> dict[str, nn.Module]:
    """Return the attentions in a block that have cut layers, by name."""
    return {
        name: part
        for name, part in block.named_modules()
        if any(hasattr(part, heads) for heads in HEADS)
        and any(layer.startswith(f"{name}.") for layer in cuts)
    }


def head_norms(block: nn.Module, cuts: Cuts) -> list[str]:
    """Return the names of the norms of a head that have weights: what attentions have besides."""
    return [
        f"{name}.{inner}"
        for name, part in attentions(block, cuts).items()
        for inner, layer in part.named_modules()
        if f"{name}.{inner}" not in cuts and [*layer.parameters(recurse=False)]
    ]


def parallelize(block: nn.Module, mesh: Any, cuts: Cuts) -> None:
    """Cut the layers of ``block`` among the ranks of ``mesh``.

    Every rank has the whole weights, and keeps its part; nothing is sent.
    """
    styles: dict[str, Any] = {}
    for name, (axis, pieces) in cuts.items():
        styles[name] = ColwiseParallel() if axis == 0 else RowwiseParallel()
        layer = block.get_submodule(name)
        for p in (layer.weight, layer.bias if axis == 0 else None):
            if p is not None and len(pieces) > 1:  # sorted by the rank that gets each row or column
                p.data = p.data.index_select(axis, _dealt(pieces, mesh.size(), p.device))
                p.order = (axis, pieces, mesh.size())
    # Each rank has the gradients of its heads; this style's weights are DTensors, which sum them.
    # A norm of a head is of the last axis alone, so any other may be called the cut one.
    styles |= {name: SequenceParallel(sequence_dim=1) for name in head_norms(block, cuts)}
    before = dict(block.named_parameters())
    for style in styles.values():
        style.use_local_output = True
    parallelize_module(block, mesh, styles, src_data_rank=None)
    for name, p in block.named_parameters():
        p.requires_grad_(before[name].requires_grad)  # SequenceParallel's weights would be trained
        p.order = getattr(before[name], "order", None)
    for part in attentions(block, cuts).values():
        for name in SIZES:
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, getattr(part, name) // mesh.size())


def order_of(p: Any) -> Tensor | None:
    """Return where each row or column of a reordered parameter is in the plain model's, on the
    CPU; None if it is in the same place."""
    return None if getattr(p, "order", None) is None else _dealt(*p.order[1:])


def _dealt(pieces: Sequence[int], ranks: int, device: Any = "cpu") -> Tensor:
    """Return the indices of all ``pieces``, sorted by the rank that gets them."""
    each = torch.arange(sum(pieces), device=device).split(pieces)
    shares = zip(*(piece.chunk(ranks) for piece in each), strict=True)
    return torch.cat([part for share in shares for part in share])


def whole(value: Tensor, p: Any) -> Tensor:
    """Return a whole tensor (gathered from ``p``'s DTensor) in the order of the plain model."""
    order = order_of(p)
    if order is None:
        return value
    return value.index_select(p.order[0], order.argsort().to(value.device))


def norm(parameters: Sequence[Any], limit: float = 0.0) -> Tensor:
    """Return the global L2 norm of their gradients, and clip them to ``limit`` (0: not at all).

    torch's ``clip_grad_norm_`` fails on gradients of several meshes: they are grouped by mesh.
    """
    by_mesh: dict[Any, list[Any]] = {}
    for p in parameters:
        if p.grad is not None:
            by_mesh.setdefault(p.grad.device_mesh, []).append(p)
    each = [torch.nn.utils.get_total_norm([p.grad for p in own]) for own in by_mesh.values()]
    total = torch.stack([part.full_tensor() for part in each]).norm()
    for own in by_mesh.values() if limit else ():
        torch.nn.utils.clip_grads_with_norm_(own, limit, total)
    return total


# ---- places of this rank's elements in a plain model's parameters ----


def pieces(name: str, p: Any) -> Iterator[Piece]:
    """Yield the pieces of a parameter that this rank holds; of equal ones only the first rank
    does."""
    mesh, placement = p.device_mesh, p.placements[-1]
    two = mesh.ndim == 2  # else it is on the ranks that share alone
    axis = placement.dim if two and placement.is_shard() else None
    # Each of the ranks that share weights has what is not cut.
    if axis is None and mesh._get_root_mesh().get_local_rank(AXIS) > 0:
        return
    rows, columns = torch.arange(p.shape[0]), None
    if axis is not None:
        order = order_of(p)
        order = torch.arange(p.shape[axis]) if order is None else order
        mine = order.chunk(mesh.size(1))[mesh.get_local_rank(1)]
        rows, columns = (mine, None) if axis == 0 else (rows, mine)
    own, rank = rows.chunk(mesh.size(0)), mesh.get_local_rank(0)
    rows, width = own[rank] if rank < len(own) else rows[:0], p.shape[1:].numel()
    if columns is None:
        for start, begin, length in _contiguous(rows):
            yield Piece(name, start * width, length * width, begin * width)
        return
    behind, runs = p.shape[2:].numel(), [*_contiguous(columns)]
    for place, row in enumerate(rows.tolist()):
        for start, begin, length in runs:
            first = (place * len(columns) + start) * behind
            yield Piece(name, first, length * behind, row * width + begin * behind)


def _contiguous(places: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (start here, start there, length) of each run of consecutive ``places``."""
    cuts = [0, *((places.diff() != 1).nonzero().flatten() + 1).tolist(), len(places)]
    for start, end in itertools.pairwise(cuts):
        if end > start:
            yield start, int(places[start]), end - start
