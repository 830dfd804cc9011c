"""Sharding by FSDP2: accelerate's plugin, ``fully_shard`` for each block, and facts of the result.

Each block gets its weights and is sharded before the next one, so no rank ever holds the whole
model, as by default; accelerate shards the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strategies import initial
from strategies.initial import Draw
from strategies.inventory import AllocationScope, Piece
from strategies.launch_file import Layout
from strategies.parallel.tensor.parallelize import AXIS, parallelize, plan


def stand_in(accelerator: Any, layout: Layout) -> None:
    """Set accelerate's state on a machine without a GPU to FSDP, with its plugin, as accelerate
    1.15 does on GPUs alone: state.py (``AcceleratorState.__init__``, below MULTI_GPU)."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin()
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinned memory needs a GPU
    accelerator.state.fsdp_plugin = plugin
    if meshed(layout):
        config = parallelism(layout)
        accelerator.state.parallelism_config = config
        known = "cuda" if accelerator.device.type == "cuda" else "cpu"  # a prediction's is neither
        accelerator.state.device_mesh = config.get_device_mesh(known)


def meshed(layout: Layout) -> bool:
    """Return whether weights are sharded over fewer than all ranks, which accelerate needs a mesh
    for."""
    return layout.replicate > 1 or layout.tensor > 1


def parallelism(layout: Layout) -> Any:
    """Return accelerate's parallelism config for ``layout``."""
    from accelerate.parallelism_config import ParallelismConfig

    return ParallelismConfig(
        dp_replicate_size=layout.replicate, dp_shard_size=layout.sharers, tp_size=layout.tensor
    )


def settle(accelerator: Any, reshard: bool) -> None:
    """Write settings into accelerate's plugin that it cannot read in a launch file."""
    plugin = accelerator.state.fsdp_plugin
    plugin.reshard_after_forward = reshard
    # Blocks are sharded before accelerate comes to the rest (``shard``): by then it would not find
    # the classes that public models name for it.
    plugin.transformer_cls_names_to_wrap = []
    if plugin.mixed_precision_policy is not None:
        # It would round timesteps too: 842.4 is 844 in bfloat16. The model casts its inputs.
        plugin.mixed_precision_policy = dataclasses.replace(
            plugin.mixed_precision_policy, cast_forward_inputs=False
        )


def shard(
    accelerator: Any, module: nn.Module, blocks: Sequence[nn.Module], draw: Draw | None = None
) -> None:
    """Shard ``module`` in place, unless it is sharded; ``draw`` returns weights that do not exist
    yet."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    if isinstance(module, FSDPModule):
        return
    mesh = accelerator.torch_device_mesh
    tensor = mesh[AXIS] if mesh is not None and AXIS in mesh.mesh_dim_names else None
    options = _options(accelerator)
    cuts = [{}] * len(blocks) if tensor is None else plan(module, blocks)
    for block, of_block in zip(blocks, cuts, strict=True):
        _filled(accelerator, block, draw)
        if tensor is not None:  # tensor parallelism: each rank keeps its part of the matrices
            parallelize(block, tensor, of_block)
        with _marks_kept(block):
            fully_shard(block, **options)
    _filled(accelerator, module, draw)
    with _marks_kept(module):
        fsdp2_prepare_model(accelerator, module)
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy
    if policy is not None and policy.param_dtype is not None:
        # The type of gathered weights: shards do not show it, and no inputs are cast.
        module.computes_in = policy.param_dtype


def _options(accelerator: Any) -> dict[str, Any]:
    """Return the options of ``fully_shard`` that accelerate uses (``fsdp2_prepare_model``)."""
    plugin, mesh = accelerator.state.fsdp_plugin, accelerator.torch_device_mesh
    names = accelerator.parallelism_config.fsdp_dim_names if mesh is not None else ()
    return {
        "mesh": mesh[tuple(names)] if mesh is not None else None,
        "reshard_after_forward": plugin.reshard_after_forward,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "offload_policy": plugin.cpu_offload,
    }


def _filled(accelerator: Any, part: nn.Module, draw: Draw | None) -> None:
    """Draw the weights of ``part``; in mixed precision trained weights are float32, as accelerate
    keeps them: all of a group have one type."""
    if draw is not None:
        initial.fill(part, draw, accelerator.device)
    initial.replace(part, lambda p: _on_device(p, accelerator.device))
    _unpack(part, accelerator.device)
    if accelerator.mixed_precision != "no":
        for p in part.parameters():
            if p.requires_grad and p.dtype is not torch.float32:
                p.data = p.data.float()
    for own in (module._buffers for module in part.modules()):
        # torch moves them by their data, which fails for tensors without storage.
        own.update({key: b.to(accelerator.device) for key, b in own.items() if b is not None})


def _unpack(part: nn.Module, device: torch.device) -> None:
    """Replace bitsandbytes' packed weights by plain bytes, which can be sharded; their scales stay
    whole, with the layer."""
    for layer in part.modules():
        weight = layer._parameters.get("weight")
        state = getattr(weight, "quant_state", None)
        if state is None or isinstance(weight, DTensor):
            continue
        state.to(device)
        if hasattr(weight, "bnb_quantized"):  # bitsandbytes' own class
            layer.weight = nn.Parameter(weight.data.as_subclass(torch.Tensor).to(device), False)
            layer.weight.quant_state = state
        layer.quant_state = state


def _on_device(p: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Move a weight without storage to its device: torch would move it by its data."""
    alone = initial.storageless() and not isinstance(p, DTensor)
    return initial.moved(p, device) if alone and p.device.type != device.type else p


@contextlib.contextmanager
def _marks_kept(part: nn.Module) -> Iterator[None]:
    """Copy attributes that strategies set on parameters to the parameters that replace them. Those
    of a tensor's class are left out: torchao's float8 weight has the whole one."""
    marks = {}
    for name, p in part.named_parameters():
        usual = vars(nn.Parameter(p.detach(), requires_grad=False))
        marks[name] = {key: value for key, value in vars(p).items() if key not in usual}
    yield
    for name, p in part.named_parameters():
        for key, value in marks.get(name, {}).items():
            vars(p).setdefault(key, value)


def enlist(accelerator: Any, module: nn.Module) -> None:
    """Register the sharded model with accelerate as prepared, and reshard it after forward-only
    passes: otherwise only a backward releases gathered weights."""
    accelerator._models.append(module)

    def let_go(module: nn.Module, given: Any, out: Any) -> None:
        if not torch.is_grad_enabled():
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    module.register_forward_hook(let_go)


# ---- tensors of a sharded model ----
# Attribute names are torch's own (2.13, ``torch.distributed.fsdp._fully_shard``); evidence fails
# with an error if one is missing.


def groups(module: nn.Module) -> list[Any]:
    """Return torch's parameter groups, each gathered at once, in the order of the modules."""
    states = [m._get_fsdp_state() for m in module.modules() if isinstance(m, FSDPModule)]
    found = [group for state in states for group in state._fsdp_param_groups]
    return list({id(group): group for group in found}.values())


def gathered_as(module: nn.Module) -> str:
    """Return the floating types in which torch gathers weights, which are those of the forward
    pass."""
    kinds = {p.param_dtype or p.orig_dtype for g in groups(module) for p in g.fsdp_params}
    return "+".join(sorted(str(k).removeprefix("torch.") for k in kinds if k.is_floating_point))


def process_groups(module: nn.Module) -> list[Any]:
    """Return the process groups of gathers and reductions: ranks that share, and ranks that hold
    the same share."""
    meshes = [group.mesh_info for group in groups(module)]
    names = ("shard_process_group", "replicate_process_group")
    found = [getattr(mesh, name) for mesh in meshes for name in names if hasattr(mesh, name)]
    return list({group.group_name: group for group in found}.values())


def local(tensor: Any) -> Any:
    """Return this rank's share of a DTensor, without torchao's wrapper, which has no storage; any
    other tensor unchanged."""
    share = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return getattr(share, "_tensor", share)


def gathered(module: nn.Module) -> list[torch.Tensor]:
    """Return the whole parameters that take a gradient, of those gathered so far. They have memory
    only while they are gathered."""
    params = [p for group in groups(module) for p in group.fsdp_params]
    known = [p._unsharded_param for p in params if hasattr(p, "_unsharded_param")]
    return [p for p in known if p.requires_grad]


def gradient_bucket_bytes(module: nn.Module) -> list[int]:
    """Return the bytes of each tensor in which a group's reduced gradients arrive: a share of its
    trained weights, padded to equal rows on every rank."""
    found = [[p for p in g.fsdp_params if p.sharded_param.requires_grad] for g in groups(module)]
    return [
        sum(p.padded_sharded_param_size.numel() * p.sharded_param.element_size() for p in group)
        for group in found
        if group
    ]


def pieces(name: str, p: Any) -> Iterator[Piece]:
    """Yield the rows of a parameter; of replica groups only the first's."""
    if p.device_mesh.ndim == 1 or p.device_mesh.get_local_rank(0) == 0:
        _, start = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        yield Piece(name, 0, local(p).numel(), start[0] * p.shape[1:].numel())


def makers() -> Iterator[AllocationScope]:
    """Yield the methods that gather weights, and those that hold or cast whole gradients: they wait
    for the last micro-batch."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    for name in ("unshard", "wait_for_unshard", "reshard"):
        yield AllocationScope(FSDPParamGroup, name, "gathered")
    for name in ("to_accumulated_grad_if_needed", "accumulate_unsharded_grad_if_needed"):
        yield AllocationScope(FSDPParam, name, "gradients")
