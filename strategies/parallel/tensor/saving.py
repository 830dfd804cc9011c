"""Weights and states that neighbours have parts of, saved as a plain model's and read again.

Imports torch: import it only where it is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strategies.parallel.tensor import boxed
from strategies.parallel.tensor.gathering import whole
from strategies.parallel.tensor.products import Cut, layers
from strategies.parallel.tensor.shares import share_of

if TYPE_CHECKING:
    from strategies.engine import Trained

__all__ = ["save_whole"]


def save_whole(trained: Trained) -> None:
    """Have the model and the optimizer give and take states of whole weights from now on: what is
    saved is a plain model's. All ranks must ask for a state; the main process alone has all of it
    whole, in host memory, or each rank its own rows for torch's distributed checkpoints."""
    for layer in layers(trained.module):
        layer.register_state_dict_post_hook(_joined)
        layer.register_load_state_dict_pre_hook(_parted)
    module, optimizer = trained.module, trained.inner_optimizer
    optimizer.register_state_dict_post_hook(lambda o, state: _states(o, state, module))
    optimizer.register_load_state_dict_pre_hook(_part_states)


def _kept(mine: Tensor, p: Tensor, module: nn.Module) -> Tensor:
    """The whole on the main process; elsewhere, where nobody writes it, the part. Of what ranks
    shard, which all write, where its rows lie in the whole."""
    if isinstance(mine, DTensor):
        return boxed.put(mine, p)
    joined = whole(mine, p, module)
    return joined.cpu() if dist.get_rank() == 0 else mine


def _joined(layer: Cut, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, p in layer.named_parameters(recurse=False):
        if share_of(p) is not None:
            state[prefix + name] = _kept(p, p, layer)


def _parted(layer: Cut, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, p in layer.named_parameters(recurse=False):
        if prefix + name in state:
            state[prefix + name] = _part(state[prefix + name], p)


def _part(saved: Any, p: Tensor) -> Any:
    """This rank's part of what was saved whole; a count of steps is as it is."""
    share = share_of(p)
    if share is None or saved.shape != share.shape:
        return saved
    if isinstance(saved, DTensor):
        return boxed.taken(saved, p)
    # A view, whose strides are not its weight's, fused AdamW stepped wrongly, in silence.
    return share.part(saved).clone(memory_format=torch.contiguous_format)


def _of_parameters(optimizer: Any, state: Mapping[str, Any]) -> dict[Any, Any]:
    """The key by which a state dict names each parameter (torch's distributed checkpoints take
    names for numbers) -> the parameter."""
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
