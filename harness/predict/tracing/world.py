"""This process as rank 0 of N: accelerate's environment, a process group that moves nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from unittest import mock

import torch
from accelerate import Accelerator

from harness.launch import command
from harness.resolve import Resolved
from harness.worker.world import simulate
from strategies.engine import Imitation

__all__ = ["GPU", "make_accelerator", "world"]

GPU = "meta"
"""The device type that stands for the GPU: its tensors have no storage, and no CPU is mistaken
for it."""


@contextlib.contextmanager
def world(resolved: Resolved, imitation: Imitation) -> Iterator[None]:
    """The environment and process group in which ``Accelerator`` finds what the launch says."""
    with mock.patch.dict(os.environ, environment(resolved, imitation)):
        if imitation.ranks:
            simulate(resolved.spec.processes, imitation.rank)
        imitation.begin(resolved.launch, GPU)
        yield


def environment(resolved: Resolved, imitation: Imitation) -> dict[str, str]:
    """What ``accelerate launch`` and the harness would put into the rank's environment."""
    spec, rank = resolved.spec, dict.fromkeys(("RANK", "LOCAL_RANK"), str(imitation.rank))
    rank |= {"WORLD_SIZE": str(spec.processes), "LOCAL_WORLD_SIZE": str(spec.processes)}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    variables = {k: v for k, v in command.environment(resolved).items() if k != "OMP_NUM_THREADS"}
    # Of several processes accelerate calls the CPU cpu:0, which a fake tensor, unlike a real one,
    # takes for another device than cpu.
    variables |= {"ACCELERATE_TORCH_DEVICE": GPU if spec.device == "cuda" else "cpu"}
    if spec.device == "cuda":
        variables |= {"CUDA_VISIBLE_DEVICES": ""}
    variables |= imitation.environment(resolved.launch)
    return {**variables, **rank} if imitation.ranks else variables


def make_accelerator(resolved: Resolved, imitation: Imitation) -> Accelerator:
    """Accelerator as ``harness.worker.setup`` makes it, in the world that ``world`` made."""
    # accelerate counts processes only where a backend is named.
    launch = dataclasses.replace(resolved.launch, simulated=imitation.ranks)
    kwargs = resolved.recipe.accelerator_kwargs(launch)
    with _taken_for_cuda(resolved.spec.device):
        accelerator = Accelerator(**kwargs)
    imitation.made(accelerator, resolved.launch)
    return accelerator


@contextlib.contextmanager
def _taken_for_cuda(device: str) -> Iterator[None]:
    """accelerate scales losses only on devices that it knows by name, and asks while it is made."""
    if device != "cuda":
        yield
        return
    with mock.patch.object(Accelerator, "device", torch.device("cuda")):
        yield
