"""This process as rank 0 of N: accelerate's environment, a process group that moves nothing."""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from harness import command
from harness import world as fake_world
from harness.predict import nvme
from harness.resolve import Resolved

__all__ = ["GPU", "make_accelerator", "world"]

GPU = "meta"
"""The device type that stands for the GPU: its tensors have no storage, and no CPU is mistaken
for it."""


@contextlib.contextmanager
def world(resolved: Resolved) -> Iterator[None]:
    """The environment and process group in which ``Accelerator`` finds what the launch says."""
    spec = resolved.spec
    with mock.patch.dict(os.environ, environment(resolved)):
        if resolved.launch.engine != "NO":
            fake_world.simulate(spec.processes)
        if resolved.launch.engine == "DEEPSPEED" and spec.device == "cuda":
            from deepspeed.accelerator import set_accelerator

            from harness.predict.meta_accelerator import MetaAccelerator

            set_accelerator(MetaAccelerator())
        yield


def environment(resolved: Resolved) -> dict[str, str]:
    """What ``accelerate launch`` and the harness would put into rank 0's environment."""
    spec, rank = resolved.spec, {"RANK": "0", "LOCAL_RANK": "0"}
    rank |= {"WORLD_SIZE": str(spec.processes), "LOCAL_WORLD_SIZE": str(spec.processes)}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    found = {k: v for k, v in command.environment(spec).items() if k != "OMP_NUM_THREADS"}
    if spec.device == "cuda":
        found |= {"ACCELERATE_TORCH_DEVICE": GPU, "CUDA_VISIBLE_DEVICES": ""}
    if resolved.launch.engine == "NO":
        return found
    if resolved.launch.engine == "DEEPSPEED":
        found |= _deepspeed_environment(resolved)
    return {**found, **rank}


def _deepspeed_environment(resolved: Resolved) -> dict[str, str]:
    """accelerate's own translation of the launch file."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    words = ["--config_file", str(resolved.file.path)]
    words += ["--num_processes", str(resolved.spec.processes), "--main_process_port", "0"]
    args: Namespace = launch.launch_command_parser().parse_args([*words, "-m", "harness.train"])
    args, defaults, _ = launch._validate_launch_command(args)
    args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    _, found = prepare_deepspeed_cmd_env(args)
    return {k: v for k, v in found.items() if k.startswith("ACCELERATE_")}


def make_accelerator(resolved: Resolved) -> Accelerator:
    """Accelerator as ``harness.setup`` makes it, in the world that ``world`` made."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    asked: dict[str, Any] = resolved.recipe.accelerator_kwargs(resolved.launch)
    if resolved.launch.engine in ("DEEPSPEED", "MULTI_GPU"):
        # accelerate counts processes only where a backend is named.
        others = asked.get("kwargs_handlers", [])
        others = [h for h in others if not isinstance(h, InitProcessGroupKwargs)]
        asked["kwargs_handlers"] = [*others, InitProcessGroupKwargs(backend="fake")]
    with _taken_for_cuda(resolved.spec.device):
        accelerator = Accelerator(**asked)
    nvme.stay_in_memory(accelerator)
    if resolved.launch.engine == "MULTI_GPU":
        # Without a GPU accelerate knows no kind of several ranks but MULTI_CPU.
        for state in (PartialState, AcceleratorState):
            state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return accelerator


@contextlib.contextmanager
def _taken_for_cuda(device: str) -> Iterator[None]:
    """accelerate scales losses only on devices that it knows by name, and asks while it is made."""
    if device != "cuda":
        yield
        return
    with mock.patch.object(Accelerator, "device", torch.device("cuda")):
        yield
