"""A block's layers cut by torch (``parallelize_module``), and the whole of the cut weights.

``fully_shard`` comes after it, so that a cut weight is a DTensor on two axes of a mesh: rows among
the ranks that share a part, and its part. A layer that holds several matrices (packed queries, keys
and values) is in the order of the ranks: each has its share of every one, side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from strategies.inventory import Fragment
from strategies.parallel.tensor.products import Cut, head_norms, products, scale_sizes

AXIS = "tp"
"""Name of the mesh's axis among whose ranks weights are cut, as accelerate names it."""


def parallelize(block: nn.Module, mesh: Any) -> None:
    """Cut the layers of ``block`` that ``products`` finds among the ranks of ``mesh``.

    Every rank has the whole weights, and keeps its part; nothing is sent.
    """
    plan: dict[str, Any] = {}
    for name, cut in products(block).items():
        plan[name] = ColwiseParallel() if cut.axis == 0 else RowwiseParallel()
        _reorder(block.get_submodule(name), cut, mesh.size())
    # Each rank has the gradients of its heads; this style's weights are DTensors, which sum them.
    # A norm of a head is of the last axis alone, so any other may be called the cut one.
    plan |= {name: SequenceParallel(sequence_dim=1) for name in head_norms(block)}
    before = dict(block.named_parameters())
    for style in plan.values():
        style.use_local_output = True
    parallelize_module(block, mesh, plan, src_data_rank=None)
    for name, p in block.named_parameters():
        p.requires_grad_(before[name].requires_grad)  # SequenceParallel's weights would be trained
        p.order = getattr(before[name], "order", None)
    scale_sizes(block, lambda size: size // mesh.size())


def _reorder(layer: nn.Linear, cut: Cut, ranks: int) -> None:
    """Sort a packed layer's rows or columns by the rank that gets them, and note the order."""
    if len(cut.pieces) == 1:
        return
    for p in (layer.weight, layer.bias if cut.axis == 0 else None):
        if p is not None:
            p.data = p.data.index_select(cut.axis, _dealt(cut.pieces, ranks, p.device))
            p.order = (cut.axis, cut.pieces, ranks)


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


def fragments(named: Sequence[tuple[str, Any]], *, copies: bool) -> Iterator[Fragment]:
    """Yield the pieces of each parameter that this rank holds; of equal ones only the first rank
    does, unless ``copies``."""
    for index, (name, p) in enumerate(named):
        mesh, placement = p.device_mesh, p.placements[-1]
        two = mesh.ndim == 2  # else it is on the ranks that share alone
        axis = placement.dim if two and placement.is_shard() else None
        # Each of the ranks that share weights has what is not cut.
        if axis is None and not copies and mesh._get_root_mesh().get_local_rank(AXIS) > 0:
            continue
        rows, columns = torch.arange(p.shape[0]), None
        if axis is not None:
            order = order_of(p)
            order = torch.arange(p.shape[axis]) if order is None else order
            mine = order.chunk(mesh.size(1))[mesh.get_local_rank(1)]
            rows, columns = (mine, None) if axis == 0 else (rows, mine)
        own = rows.chunk(mesh.size(0))
        rank = mesh.get_local_rank(0)
        yield from _runs(name, index, p, own[rank] if rank < len(own) else rows[:0], columns)


def _runs(
    name: str, index: int, p: Any, rows: Tensor, columns: Tensor | None
) -> Iterator[Fragment]:
    width = p.shape[1:].numel()
    if columns is None:
        for start, begin, length in _contiguous(rows):
            yield Fragment(name, index, start * width, length * width, begin * width)
        return
    behind, pieces = p.shape[2:].numel(), [*_contiguous(columns)]
    for place, row in enumerate(rows.tolist()):
        for start, begin, length in pieces:
            mine = (place * len(columns) + start) * behind
            yield Fragment(name, index, mine, length * behind, row * width + begin * behind)


def _contiguous(places: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (start here, start there, length) of each run of consecutive ``places``."""
    cuts = [0, *((places.diff() != 1).nonzero().flatten() + 1).tolist(), len(places)]
    for start, end in itertools.pairwise(cuts):
        if end > start:
            yield start, int(places[start]), end - start
