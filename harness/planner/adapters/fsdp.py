"""Adapter of FSDP2 for predictions: simulates ranks and a GPU.
torch's own sharding runs unchanged: it cuts, gathers and frees as in a run, over a process group
that moves nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from harness.planner.adapters.base import (
    AllocationRecorder,
    ResolvedConfig,
    TraceAdapter,
    launcher_arguments,
)
from strategies.launch_file import Layout

if TYPE_CHECKING:
    from strategies.engine import RunContext, Workload


GPU = "meta"


class FsdpAdapter(TraceAdapter):
    """Adapter that runs accelerate's FSDP2 without storage."""

    def resolved_config(
        self,
        launch: RunContext,
        work: Callable[[Path], Workload],
        mixed_precision: str,
        configure: Callable[[Any], None],
        folder: Path,
    ) -> ResolvedConfig:
        made = super().resolved_config(launch, work, mixed_precision, configure, folder)
        return made._replace(content=resolved(made.content, self.engine.reshard, launch.layout))

    def overlapped_phases(self, launch: RunContext) -> frozenset[str]:
        """Return the phases in which gathers and reductions overlap with the current block, on a
        GPU."""
        return frozenset({"forward", "backward"} if launch.device == "cuda" else ())

    def environment(self, launch: RunContext) -> dict[str, str]:
        """Return accelerate's translation of the launch file."""
        from accelerate.utils.launch import prepare_multi_gpu_env

        args, _ = launcher_arguments(self.engine.file, launch.processes)
        variables = prepare_multi_gpu_env(args)
        return {k: v for k, v in variables.items() if k.startswith("FSDP_")}

    def patches(
        self, launch: RunContext, recorder: AllocationRecorder
    ) -> list[contextlib.AbstractContextManager[Any]]:
        found = _meshes() + (_simulated_gpu() if launch.device == "cuda" else [])
        return [mock.patch.object(*patch, create=True) for patch in found]

    def adapt_accelerator(self, accelerator: Any, launch: RunContext) -> None:
        """Set accelerate's state to FSDP, which it does only on GPUs."""
        from strategies.engines.fsdp import shard

        if launch.device == "cuda":  # on a CPU the engine's ``configure`` does it, as in a run
            shard.stand_in(accelerator, launch.layout)


def resolved(content: Mapping[str, Any], reshard: bool, layout: Layout) -> dict[str, Any]:
    """Return ``content`` of a launch file with the recipe's ``reshard`` and ``layout``.
    FSDP2 ignores FSDP 1's key for groups of ranks: they are dimensions of a mesh there. Source:
    accelerate 1.15,
    utils/dataclasses.py (``FullyShardedDataParallelPlugin``), parallelism_config.py."""
    block = {k: v for k, v in content["fsdp_config"].items() if k != "fsdp_sharding_strategy"}
    block["fsdp_reshard_after_forward"] = reshard
    if layout.replicate == 1:
        return {**content, "fsdp_config": block}
    sizes = {"dp_replicate_size": layout.replicate, "dp_shard_size": layout.sharers}
    mesh = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    return {**content, "fsdp_config": block, "parallelism_config": mesh}


def _meshes() -> list[tuple[Any, str, Any]]:
    from accelerate.parallelism_config import ParallelismConfig
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard import _fully_shard
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    # A mesh reads the values of its rank numbers, so no dispatch mode may be on.
    meshes = [
        (DeviceMesh, "__init__"),
        (DeviceMesh, "__getitem__"),
        (DeviceMesh, "_flatten"),
        (DeviceMesh, "from_group"),
        (ParallelismConfig, "build_device_mesh"),
        (_fully_shard, "_init_default_mesh"),
    ]
    # torch computes the shape of a DTensor operation on tensors of the whole size.
    shapes = [(ShardingPropagator, "_propagate_tensor_meta_non_cached")]
    return [(owner, name, _unwatched(getattr(owner, name))) for owner, name in (*meshes, *shapes)]


def _simulated_gpu() -> list[tuple[Any, str, Any]]:
    import torch
    from torch.distributed.fsdp._fully_shard import _fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from harness.planner.tracing import side_streams

    init = FSDPParam._init_sharded_param

    def hosted(self: Any, *given: Any, **more: Any) -> None:
        init(self, *given, **more)
        if self.offload_to_cpu:
            _to_host(self)

    streams = SimpleNamespace(  # a module like torch.cuda, for the simulated GPU's device type
        Stream=side_streams.Stream,
        Event=side_streams.Event,
        current_stream=side_streams.current,
        stream=side_streams.inside,
        current_device=lambda: 0,
    )
    return [
        (torch, GPU, streams),
        (_fully_shard, "_get_device_from_mesh", lambda mesh: torch.device(GPU)),
        (FSDPParam, "_init_sharded_param", hosted),
        (FSDPParamGroup, "_validate_no_meta_params", lambda self: None),
    ]


def _unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with all dispatch modes off, so that its tensors have storage."""
    from torch.utils._python_dispatch import _disable_current_modes

    def run(*given: Any, **more: Any) -> Any:
        with _disable_current_modes():
            return function(*given, **more)

    return run


def _to_host(parameter: Any) -> None:
    """Move a parameter's share to host memory; ``FSDPParam`` leaves tensors on meta there."""
    import torch
    from torch import nn

    data, share = parameter._sharded_param_data, parameter.sharded_param
    rows, wide = share._local_tensor.shape[:1], parameter.padded_sharded_param_size
    with torch.no_grad():
        parameter._sharded_param_data = data.to("cpu")
        mine = parameter._sharded_param_data.view(wide).narrow(0, 0, *rows)
        new = nn.Parameter(parameter.to_sharded_dtensor(mine), share.requires_grad)
    parameter.sharded_param = new
    parameter._setattr_on_modules(new)
