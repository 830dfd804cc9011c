"""Whole weights, gradient norms and checkpoints of weights that ranks hold shares of.

A checkpoint is that of a plain model: it can be read with any number of ranks. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strategies.inventory import Fragment
from strategies.parallel.tensor.layers import ParallelLinear, Share, parallel_layers, share_of

if TYPE_CHECKING:
    from strategies.engine import TrainingRun


def group_of(module: nn.Module) -> Any:
    """Return the process group of the ranks that hold shares of the same weights."""
    return parallel_layers(module)[0].group


def whole(mine: Tensor, p: Tensor, module: nn.Module) -> Tensor:
    """Gather the whole of ``mine``, which is laid out as the parameter ``p`` of ``module``; all
    ranks of the group call it. Returns ``mine`` if ``p`` is whole."""
    share, group = share_of(p), group_of(module)
    if share is None:
        return mine
    mine = mine.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(share.parts)]
    dist.all_gather(parts, mine, group=group)
    return share.joined(parts)


def norm(trained: TrainingRun) -> Tensor:
    """Return the global L2 norm of the gradients: each share counts once, and so does a gradient
    that all ranks have."""
    grads = [(p.grad, share_of(p)) for p in trained.module.parameters() if p.grad is not None]
    parts = _squared([g for g, share in grads if share])
    dist.all_reduce(parts, group=group_of(trained.module))
    return (parts + _squared([g for g, share in grads if not share])).sqrt()


def _squared(gradients: list[Tensor]) -> Tensor:
    """Return the square of their norm over all ranks that shard them."""
    found = torch.nn.utils.get_total_norm(gradients)
    found = found.full_tensor() if isinstance(found, DTensor) else found
    return found.float().square()


def placed(trained: TrainingRun, own: Iterable[Fragment], *, copies: bool) -> Iterator[Fragment]:
    """Yield the engine's ``own`` fragments with their offsets in whole parameters. Only the first
    rank of the group yields whole parameters, unless ``copies`` is set."""
    parameters = dict(trained.module.named_parameters())
    first = trained.accelerator.process_index % trained.launch.layout.tensor == 0
    for piece in own:
        share = share_of(parameters[piece.name])
        if share is not None:
            yield from _within(piece, share)
        elif copies or first:
            yield piece


def _within(piece: Fragment, share: Share) -> Iterator[Fragment]:
    """Split a fragment of the share at the boundaries of its contiguous runs."""
    end = piece.offset + piece.numel
    for start, offset, numel in share.runs():
        low, high = max(start, piece.offset), min(start + numel, end)
        if low < high:
            mine = piece.start + low - piece.offset
            yield Fragment(piece.name, piece.shard, mine, high - low, offset + low - start)


# ---- state dicts ----


def save_whole(trained: TrainingRun) -> None:
    """Install hooks by which the model's and the optimizer's state dicts hold whole weights. All
    ranks must ask for a state dict. The main process gets whole tensors in host memory; torch's
    distributed checkpoints get each rank's rows."""
    for layer in parallel_layers(trained.module):
        layer.register_state_dict_post_hook(_joined)
        layer.register_load_state_dict_pre_hook(_parted)
    module, optimizer = trained.module, trained.inner_optimizer
    optimizer.register_state_dict_post_hook(lambda o, state: _states(o, state, module))
    optimizer.register_load_state_dict_pre_hook(_part_states)


def _kept(mine: Tensor, p: Tensor, module: nn.Module) -> Tensor:
    """Return the whole on the main process and ``mine`` elsewhere, because only the main process
    writes. All ranks write a sharded parameter: it becomes rows with their place in the whole."""
    if isinstance(mine, DTensor):
        return rows_in_whole(mine, p)
    joined = whole(mine, p, module)
    return joined.cpu() if dist.get_rank() == 0 else mine


def _joined(layer: ParallelLinear, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, p in layer.named_parameters(recurse=False):
        if share_of(p) is not None:
            state[prefix + name] = _kept(p, p, layer)


def _parted(layer: ParallelLinear, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, p in layer.named_parameters(recurse=False):
        if prefix + name in state:
            state[prefix + name] = _part(state[prefix + name], p)


def _part(saved: Any, p: Tensor) -> Any:
    """Return this rank's part of a whole saved tensor; any other value as it is."""
    share = share_of(p)
    if share is None or saved.shape != share.shape:
        return saved
    if isinstance(saved, DTensor):
        return rows_of_share(saved, p)
    # Contiguous: fused AdamW steps wrongly, without an error, on strides unlike its weight's.
    return share.part(saved).clone(memory_format=torch.contiguous_format)


def _of_parameters(optimizer: Any, state: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the key of each parameter in a state dict (a name in torch's distributed checkpoints,
    else a number) -> the parameter."""
    pairs = zip(state["param_groups"], optimizer.param_groups, strict=True)
    return {
        key: p
        for saved, own in pairs
        for key, p in zip(saved["params"], own["params"], strict=True)
    }


def _states(optimizer: Any, state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    named = _of_parameters(optimizer, state)
    joined = {
        index: {key: _joint(value, named[index], module) for key, value in kept.items()}
        for index, kept in state["state"].items()
    }
    return {**state, "state": joined}


def _joint(value: Any, p: Tensor, module: nn.Module) -> Any:
    alike = isinstance(value, Tensor) and share_of(p) is not None and value.shape == p.shape
    return _kept(value, p, module) if alike else value


def _part_states(optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    named = _of_parameters(optimizer, state)
    parts = {
        index: {k: _part(v, named[index]) if isinstance(v, Tensor) else v for k, v in kept.items()}
        for index, kept in state["state"].items()
    }
    return {**state, "state": parts}


# ---- rows of a share, for torch's distributed checkpoints ----


def rows_in_whole(mine: DTensor, p: Any) -> DTensor:
    """Return a DTensor of the whole shape whose local tensor has this rank's rows of ``mine``.

    It is cut as the parameter ``p``, with one shard for each box of the whole that the rows fill.
    """
    share = share_of(p)
    assert share is not None
    shape, start = compute_local_shape_and_global_offset(
        mine.shape, mine.device_mesh, mine.placements
    )
    wrapped = _shards(mine._local_tensor, share, start[0], shape[0])
    whole = {"shape": share.shape, "stride": torch.empty(share.shape, device="meta").stride()}
    return DTensor.from_local(wrapped, mine.device_mesh, mine.placements, run_check=False, **whole)


def _shards(rows: Tensor, share: Share, first: int, count: int) -> LocalShardsWrapper:
    found = list(share.boxes(first, count)) if count else []
    shards = [rows.narrow(share.axis, start, length).detach() for start, length, _ in found]
    if not found:  # an offset that no other shard has: equal offsets would be taken for duplicates
        found = [(0, 0, (share.shape[0], *[0] * (len(share.shape) - 1)))]
        shards = [rows.detach()]
    return LocalShardsWrapper(shards, [offsets for *_, offsets in found])


def rows_of_share(saved: DTensor, p: Any) -> DTensor:
    """Return what ``rows_in_whole`` gave, filled by a checkpoint, cut as ``p`` again."""
    share = share_of(p)
    assert share is not None
    rows = torch.cat(saved._local_tensor.local_shards(), share.axis)
    return DTensor.from_local(
        rows, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
