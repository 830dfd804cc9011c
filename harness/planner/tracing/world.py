"""This process as rank 0 of N: accelerate's environment, a process group that moves nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator

from harness.launch import command
from harness.planner import resident_models
from harness.resolve import Resolved
from harness.worker.environment import simulate
from strategies.engine import TraceAdapter

GPU = "meta"
"""The device type that stands for the GPU: its tensors have no storage, and no CPU is mistaken
for it."""


@contextlib.contextmanager
def world(resolved: Resolved, imitation: TraceAdapter) -> Iterator[None]:
    """The environment and process group in which ``Accelerator`` finds what the launch says."""
    with mock.patch.dict(os.environ, environment(resolved, imitation)):
        if imitation.ranks:
            simulate(resolved.spec.processes, imitation.rank)
        imitation.begin(resolved.launch, GPU)
        yield


def environment(resolved: Resolved, imitation: TraceAdapter) -> dict[str, str]:
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


def make_accelerator(resolved: Resolved, imitation: TraceAdapter) -> Accelerator:
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


# ---- history ----
# A pool's history: models that a GPU held before the training, freed while torch's cache kept
# their memory.
#
# Trainers that first encode texts and samples often empty the cache while something still refers
# to the encoders, or do not empty it at all: the segments of the encoders' weights then stay in
# the pool, and the training's tensors are put into them. What an encoder's forward leaves is not
# here.


@functools.cache
def sizes(before: str) -> tuple[int, ...]:
    """Bytes of each tensor of the models that a spec's ``before`` names, in the order in which
    ``Module.to`` moves them; one of a size alone is one tensor.

    Raises:
        BadInput: an unknown name.
    """
    found: list[int] = []
    for word in filter(None, before.split(",")):
        one = resident_models.named(word, "before")
        name, _, stored = one.name.partition(":")
        if name in resident_models.table():
            width = resident_models.BYTES[stored or resident_models.STORED]
            found += [_stored(tensor, width) for tensor in moved(built(name))]
        else:
            found.append(one.bytes)
    return tuple(found)


def leave(of: Sequence[int]) -> None:
    """Allocate tensors ``of`` these bytes on the GPU and free them, as a program that has held them
    did."""
    held = [torch.empty(size, dtype=torch.uint8, device=GPU) for size in of]
    held.clear()


def built(name: str) -> torch.nn.Module:
    """A model of the table of encoders (``beside``), without memory."""
    row = resident_models.table()[name]
    with torch.device("meta"):
        if row["class"].startswith("Autoencoder"):
            import diffusers

            return getattr(diffusers, row["class"])(**row["config"])
        import transformers

        kind = getattr(transformers, row["class"])
        return kind(kind.config_class(**row["config"]))


def moved(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Each tensor once, in the order of ``Module.to``: a module's children first, then its own
    parameters and buffers (torch 2.13, torch/nn/modules/module.py, ``_apply``)."""
    seen: set[int] = set()
    for tensor in _moved(module):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def _moved(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for child in module.children():
        yield from _moved(child)
    own: list[Any] = [*module._parameters.values(), *module._buffers.values()]
    yield from (tensor for tensor in own if tensor is not None)


def _stored(tensor: torch.Tensor, width: float) -> int:
    """Bytes of one tensor; a buffer keeps its type."""
    is_weight = isinstance(tensor, torch.nn.Parameter)
    return max(1, int(tensor.numel() * width)) if is_weight else tensor.nbytes
