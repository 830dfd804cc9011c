"""Runs a loop by an exported launch file and says what is in force, by the objects that it left:
``exported.py LOOP FOLDER WORDS`` writes a JSON a rank. accelerate looks for FSDP on GPUs alone:
where the launch file says so, its state is told here what it is told there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import state
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.optim.optimizer import register_optimizer_step_pre_hook

from harness.system.process import die_with_parent
from strategies.engines.fsdp import shard as sharded


def as_on_gpus() -> None:
    """FSDP as ``AcceleratorState`` takes it from a launch file below MULTI_GPU (accelerate 1.15,
    state.py), on processes that it started without one."""
    begin = state.AcceleratorState.__init__

    def init(self: Any, *given: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        begin(self, *given, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is None or self.distributed_type is DistributedType.FSDP:
            return
        for each in (state.PartialState, state.AcceleratorState):
            each._shared_state["distributed_type"] = DistributedType.FSDP
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        if isinstance(fsdp_plugin.cpu_offload, CPUOffloadPolicy):
            fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinned for a GPU
        self.fsdp_plugin = fsdp_plugin

    state.AcceleratorState.__init__ = init


# ---- what is in force ----


def facts(trained: dict[str, Any]) -> dict[str, Any]:
    """What any engine's objects say."""
    accelerator, model = trained["accelerator"], trained["model"]
    bare, inner = accelerator.unwrap_model(model), trained["optimizer"]
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    group = inner.param_groups[0]
    return {
        "type": accelerator.distributed_type.value,
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "accumulation": accelerator.gradient_accumulation_steps,
        "model": type(model).__name__,
        "weights": sorted({str(p.dtype) for p in bare.parameters()}),
        "optimizer": type(inner).__name__,
        "settings": [group[key] for key in ("lr", "betas", "eps", "weight_decay")],
        "sum": float(sum(sharded.local(p.detach()).double().sum() for p in bare.parameters())),
        **of_zero(model),
        **of_shards(model),
    }


def of_zero(model: Any) -> dict[str, Any]:
    """DeepSpeed's own words."""
    if not hasattr(model, "zero_optimization_stage"):
        return {}
    buckets = (model.zero_reduce_bucket_size(), model.zero_allgather_bucket_size())
    offloads = {"optimizer": model.zero_offload_optimizer(), "weights": model.zero_offload_param()}
    return {
        "stage": model.zero_optimization_stage(),
        "zero_class": type(model.optimizer).__name__,
        "bf16": model.bfloat16_enabled(),
        "master": not model.bf16_master_weights_and_gradients(),
        "micro_batch": model.train_micro_batch_size_per_gpu(),
        "batch": model.train_batch_size(),
        "steps_accumulated": model.gradient_accumulation_steps(),
        "clip": model.gradient_clipping(),
        "buckets": buckets,
        "taken": model.global_steps,
        "offloaded": {
            name: str(getattr(found.device, "value", found.device))
            for name, found in offloads.items()
            if found
        },
        "swaps": getattr(model.optimizer, "swap_optimizer", False) and any(folder.glob("nvme/*")),
        "partitioned": sum(hasattr(p, "ds_tensor") for p in model.module.parameters()),
    }


def of_shards(model: nn.Module) -> dict[str, Any]:
    """torch's own groups under FSDP2: of which modules, cut by which ranks, computed in what."""
    if not isinstance(model, FSDPModule):
        return {}
    shards = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    found = [(m, group) for m in shards for group in m._get_fsdp_state()._fsdp_param_groups]
    after = [g.post_forward_mesh_info for _, g in found]
    return {
        "gathered": sorted({type(m).__name__.removeprefix("FSDP") for m, _ in found}),
        "groups": len(found),
        "reshards": sorted({mesh.shard_mesh_size if mesh else 0 for mesh in after}),
        "offloads": sorted({isinstance(g.offload_policy, CPUOffloadPolicy) for _, g in found}),
        "mesh": sorted({tuple(p.device_mesh.shape) for p in model.parameters()}),
    }


def squared_norm(optimizer: Any) -> float:
    """Of the gradients that an optimizer is about to step with, this rank's part of them."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    return float(sum(sharded.local(grad).double().square().sum() for grad in grads))


die_with_parent()
seen: list[float] = []
register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(squared_norm(optimizer)))
script, folder = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.insert(0, str(script.parent))
if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    os.environ["ACCELERATE_USE_CPU"] = "true"  # or it would connect no processes
    as_on_gpus()
sys.argv[1:] = sys.argv[3:]
space = {"__name__": "exported", "__file__": str(script)}
exec(compile(script.read_text(), str(script), "exec"), space)
trained = space["main"]()
path = folder / f"rank{trained['accelerator'].process_index}.json"
path.write_text(json.dumps(facts(trained) | {"squared_norms": seen}))
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
