"""Trace adapter of FSDP2: simulates ranks and a GPU in a prediction.

torch's own sharding runs unchanged: it cuts, gathers and frees as in a run, over a process group
that moves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from accelerate.parallelism_config import ParallelismConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from strategies import side_streams
from strategies.engine import Engine, TraceAdapter
from strategies.engines.fsdp import shard
from strategies.engines.launcher import arguments
from strategies.inventory import AllocationRecorder

if TYPE_CHECKING:
    from strategies.engine import RunContext


GPU = "meta"


class Unstored(TraceAdapter):
    """Adapter that runs accelerate's FSDP2 for the launch of ``engine``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.gpu = False

    def beside(self, launch: RunContext) -> frozenset[str]:
        """Return the phases in which gathers and reductions overlap with the current block, on a
        GPU."""
        return frozenset({"forward", "backward"} if launch.device == "cuda" else ())

    def environment(self, launch: RunContext) -> dict[str, str]:
        """Return accelerate's translation of the launch file."""
        from accelerate.utils.launch import prepare_multi_gpu_env

        args, _ = arguments(self.engine.file.path, launch.processes)
        variables = prepare_multi_gpu_env(args)
        return {k: v for k, v in variables.items() if k.startswith("FSDP_")}

    def begin(self, launch: RunContext, device: str) -> None:
        self.gpu = launch.device == "cuda"

    def made(self, accelerator: Any, launch: RunContext) -> None:
        """Set accelerate's state to FSDP, which it does only on GPUs."""
        if not self.gpu:
            return  # the engine's ``configure`` does it, as in a run on a CPU
        shard.stand_in(accelerator, launch.layout)

    def stand_ins(self, books: AllocationRecorder) -> list[contextlib.AbstractContextManager[Any]]:
        return [mock.patch.object(*patch, create=True) for patch in _patches(self.gpu)]


STREAMS = SimpleNamespace(
    Stream=side_streams.Stream,
    Event=side_streams.Event,
    current_stream=side_streams.current,
    stream=side_streams.inside,
    current_device=lambda: 0,
)
"""Module like torch.cuda, for the device type of the simulated GPU."""


def _patches(gpu: bool) -> list[tuple[Any, str, Any]]:
    # A mesh reads the values of its rank numbers, so no dispatch mode may be on.
    meshes = [
        (DeviceMesh, "__init__"),
        (DeviceMesh, "__getitem__"),
        (DeviceMesh, "_flatten"),
        (DeviceMesh, "from_group"),
        (ParallelismConfig, "build_device_mesh"),
        (_fully_shard, "_init_default_mesh"),
        (_fully_shard, "_get_post_forward_mesh_info"),
    ]
    # torch computes the shape of a DTensor operation on tensors of the whole size.
    shapes = [(ShardingPropagator, "_propagate_tensor_meta_non_cached")]
    unwatched = (*meshes, *shapes)
    patches = [(owner, name, _unwatched(getattr(owner, name))) for owner, name in unwatched]
    if not gpu:
        return patches
    init = FSDPParam._init_sharded_param

    def hosted(self: Any, *given: Any, **more: Any) -> None:
        init(self, *given, **more)
        if self.offload_to_cpu:
            _to_host(self)

    return [
        *patches,
        (torch, GPU, STREAMS),
        (_fully_shard, "_get_device_from_mesh", lambda mesh: torch.device(GPU)),
        (FSDPParam, "_init_sharded_param", hosted),
        (FSDPParamGroup, "_validate_no_meta_params", lambda self: None),
    ]


def _unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with all dispatch modes off, so that its tensors have storage."""

    def run(*given: Any, **more: Any) -> Any:
        with _disable_current_modes():
            return function(*given, **more)

    return run


def _to_host(parameter: Any) -> None:
    """Move a parameter's share to host memory; ``FSDPParam`` leaves tensors on meta there."""
    data, share = parameter._sharded_param_data, parameter.sharded_param
    rows, wide = share._local_tensor.shape[:1], parameter.padded_sharded_param_size
    with torch.no_grad():
        parameter._sharded_param_data = data.to("cpu")
        mine = parameter._sharded_param_data.view(wide).narrow(0, 0, *rows)
        new = nn.Parameter(parameter.to_sharded_dtensor(mine), share.requires_grad)
    parameter.sharded_param = new
    parameter._setattr_on_modules(new)
