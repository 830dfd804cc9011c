"""What a rank holds of a model that ``fully_shard`` has cut: groups, shares, gathered weights.

Attribute names are torch's own (2.13, ``torch.distributed.fsdp._fully_shard``); evidence fails
loudly where one is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strategies.engine import Trained
from strategies.holdings import Fragment, Maker

__all__ = [
    "arrivals",
    "fragments",
    "gathered",
    "gathered_as",
    "groups",
    "local",
    "makers",
    "process_groups",
    "state_of",
]


def groups(module: nn.Module) -> list[Any]:
    """torch's parameter groups, each gathered as one, in the order of the modules."""
    states = [m._get_fsdp_state() for m in module.modules() if isinstance(m, FSDPModule)]
    found = [group for state in states for group in state._fsdp_param_groups]
    return list({id(group): group for group in found}.values())


def gathered_as(module: nn.Module) -> str:
    """The floating types in which torch gathers weights: what they are when the model runs."""
    kinds = {p.param_dtype or p.orig_dtype for g in groups(module) for p in g.fsdp_params}
    return "+".join(sorted(str(k).removeprefix("torch.") for k in kinds if k.is_floating_point))


def process_groups(module: nn.Module) -> list[Any]:
    """Those among which torch gathers and reduces: of the ranks that share (of fewer of them, where
    blocks are cut again behind their forward), and of those that hold the same."""
    meshes = [m for g in groups(module) for m in (g.mesh_info, g.post_forward_mesh_info)]
    found = [group for mesh in meshes for group in _groups_of(mesh)]
    return list({group.group_name: group for group in found}.values())


def _groups_of(mesh: Any) -> Iterator[Any]:
    for name in ("shard_process_group", "replicate_process_group"):
        if hasattr(mesh, name):
            yield getattr(mesh, name)


def local(tensor: Any) -> Any:
    """This rank's share of a DTensor; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def gathered(module: nn.Module) -> list[torch.Tensor]:
    """The whole parameters that take a gradient, as far as they were ever gathered: they have
    memory only while they are."""
    params = [p for group in groups(module) for p in group.fsdp_params]
    known = [p._unsharded_param for p in params if hasattr(p, "_unsharded_param")]
    return [p for p in known if p.requires_grad]


def arrivals(module: nn.Module) -> list[int]:
    """Bytes of each tensor in which a group's gradients arrive, reduced: a share of all that it
    trains, with the rows that even out the ranks'."""
    found = [[p for p in g.fsdp_params if p.sharded_param.requires_grad] for g in groups(module)]
    return [
        sum(p.padded_sharded_param_size.numel() * p.sharded_param.element_size() for p in group)
        for group in found
        if group
    ]


def state_of(trained: Trained, shard: torch.Tensor) -> Mapping[str, Any]:
    """What the optimizer keeps of the parameter whose share on this rank is ``shard``."""
    state = trained.inner_optimizer.state
    for p in trained.module.parameters():
        if local(p) is shard:
            return {name: local(value) for name, value in state.get(p, {}).items()}
    return {}


def fragments(trained: Trained, *, copies: bool) -> Iterator[Fragment]:
    """Rows of each trained parameter; of groups that hold the same, the first group's, unless
    ``copies`` are asked for."""
    trainable = [(n, p) for n, p in trained.module.named_parameters() if p.requires_grad]
    for index, (name, p) in enumerate(trainable):
        mesh, placements = p.device_mesh, p.placements
        if not copies and mesh.ndim > 1 and mesh.get_local_rank(0) != 0:
            continue
        _, start = compute_local_shape_and_global_offset(p.shape, mesh, placements)
        row = p.shape[1:].numel()
        yield Fragment(name, index, 0, local(p).numel(), start[0] * row)


def makers() -> Iterator[Maker]:
    """Gathered weights come and go within a step; gradients that wait for the last micro batch are
    whole, and cast to the type that is sent."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    for name in ("unshard", "wait_for_unshard", "reshard"):
        yield Maker(FSDPParamGroup, name, "gathered")
    for name in ("to_accumulated_grad_if_needed", "accumulate_unsharded_grad_if_needed"):
        yield Maker(FSDPParam, name, "gradients")
