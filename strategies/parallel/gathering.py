"""Weights that neighbours cut among themselves, put together again: for what is saved, and for
sums over all of a model's weights.

Imports torch: import it only where it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.holdings import Fragment
from strategies.parallel.products import Cut, layers
from strategies.parallel.shares import share_of

if TYPE_CHECKING:
    from strategies.engine import Trained

__all__ = ["clip", "fragments", "group_of", "norm", "save_whole", "whole"]


def group_of(module: nn.Module) -> Any:
    """The ranks that have a part each of the same weights."""
    return layers(module)[0].group


def whole(mine: Tensor, p: Tensor, group: Any) -> Tensor:
    """What ``mine``, laid out as the part ``p`` of a weight, is a part of; all ranks of the group
    call it. As it is where ``p`` is whole."""
    share = share_of(p)
    if share is None:
        return mine
    mine = mine.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(share.parts)]
    dist.all_gather(parts, mine, group=group)
    return share.joined(parts)


def norm(trained: Trained) -> Tensor:
    """Global L2 norm of the gradients: of each part once, and once of what all ranks have."""
    total = torch.nn.utils.get_total_norm
    grads = [(p.grad, share_of(p)) for p in trained.module.parameters() if p.grad is not None]
    parts = total([g for g, share in grads if share]).float().square()
    dist.all_reduce(parts, group=group_of(trained.module))
    alike = total([g for g, share in grads if not share]).float().square()
    return (parts + alike).sqrt()


def clip(trained: Trained, limit: float) -> Tensor:
    """Clip the gradients to the global norm ``limit``; their norm from before."""
    before = norm(trained)
    parameters = [p for p in trained.module.parameters() if p.grad is not None]
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, before)
    return before


def fragments(trained: Trained, *, copies: bool = False) -> Iterator[Fragment]:
    """``Engine.fragments``: parts come from the first ranks that have all of them together, what is
    whole from the main process."""
    rank, layout = trained.accelerator.process_index, trained.launch.layout
    named = [(n, p) for n, p in trained.module.named_parameters() if p.requires_grad]
    for index, (name, p) in enumerate(named):
        share = share_of(p)
        if share is None and (copies or rank == 0):
            yield Fragment(name, index, 0, p.numel(), 0)
        elif share is not None and (copies or layout.share(rank) == 0):
            for start, offset, numel in share.runs():
                yield Fragment(name, index, start, numel, offset)


# ---- what is saved ----


def save_whole(trained: Trained) -> None:
    """Have the model and the optimizer give and take states of whole weights from now on: what is
    saved is a plain model's. All ranks must ask for a state; the main process alone has all of it
    whole, in host memory."""
    for layer in layers(trained.module):
        layer.register_state_dict_post_hook(_joined)
        layer.register_load_state_dict_pre_hook(_parted)
    group, optimizer = group_of(trained.module), trained.inner_optimizer
    optimizer.register_state_dict_post_hook(lambda o, state: _states(o, state, group))
    optimizer.register_load_state_dict_pre_hook(_part_states)


def _kept(mine: Tensor, p: Tensor, group: Any) -> Tensor:
    """The whole on the main process; elsewhere, where nobody writes it, the part."""
    joined = whole(mine, p, group)
    return joined.cpu() if dist.get_rank() == 0 else mine


def _joined(layer: Cut, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, p in layer.named_parameters(recurse=False):
        if share_of(p) is not None:
            state[prefix + name] = _kept(p, p, layer.group)


def _parted(layer: Cut, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, p in layer.named_parameters(recurse=False):
        if prefix + name in state:
            state[prefix + name] = _part(state[prefix + name], p)


def _part(saved: Any, p: Tensor) -> Any:
    """This rank's part of what was saved whole; a count of steps is as it is."""
    share = share_of(p)
    if share is None or saved.shape != share.shape:
        return saved
    # A view, whose strides are not its weight's, fused AdamW stepped wrongly, in silence.
    return share.part(saved).clone(memory_format=torch.contiguous_format)


def _of_parameters(optimizer: Any) -> dict[int, Any]:
    """The number by which a state dict names each parameter -> the parameter."""
    return dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))


def _states(optimizer: Any, state: Mapping[str, Any], group: Any) -> dict[str, Any]:
    named = _of_parameters(optimizer)
    joined = {
        index: {key: _joint(value, named[index], group) for key, value in kept.items()}
        for index, kept in state["state"].items()
    }
    return {**state, "state": joined}


def _joint(value: Any, p: Tensor, group: Any) -> Any:
    alike = isinstance(value, Tensor) and share_of(p) is not None and value.shape == p.shape
    return _kept(value, p, group) if alike else value


def _part_states(optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    named = _of_parameters(optimizer)
    parts = {
        index: {k: _part(v, named[index]) if isinstance(v, Tensor) else v for k, v in kept.items()}
        for index, kept in state["state"].items()
    }
    return {**state, "state": parts}
