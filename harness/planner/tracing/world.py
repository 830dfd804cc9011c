"""One rank of N in a trace: environment, fake process group, and models freed before the
training."""

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
from harness.planner.adapters.base import TraceAdapter
from harness.resolve import Resolved
from harness.worker.environment import simulate

GPU = "meta"
"""Device type that represents the GPU. Its tensors have no storage, and it differs from the
CPU's."""


@contextlib.contextmanager
def world(resolved: Resolved, adapter: TraceAdapter) -> Iterator[None]:
    """Enter the environment and process group in which ``Accelerator`` finds the launch's
    settings."""
    with mock.patch.dict(os.environ, environment(resolved, adapter)):
        if adapter.ranks:
            simulate(resolved.spec.processes, adapter.rank)
        adapter.begin(resolved.launch, GPU)
        yield


def environment(resolved: Resolved, adapter: TraceAdapter) -> dict[str, str]:
    """Return the variables that ``accelerate launch`` and the harness would set for the rank."""
    spec, rank = resolved.spec, dict.fromkeys(("RANK", "LOCAL_RANK"), str(adapter.rank))
    rank |= {"WORLD_SIZE": str(spec.processes), "LOCAL_WORLD_SIZE": str(spec.processes)}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    variables = {k: v for k, v in command.environment(resolved).items() if k != "OMP_NUM_THREADS"}
    # With several processes accelerate calls the CPU cpu:0. Unlike a real tensor, a fake one
    # treats that as another device than cpu.
    variables |= {"ACCELERATE_TORCH_DEVICE": GPU if spec.device == "cuda" else "cpu"}
    if spec.device == "cuda":
        variables |= {"CUDA_VISIBLE_DEVICES": ""}
    variables |= adapter.environment(resolved.launch)
    return {**variables, **rank} if adapter.ranks else variables


def make_accelerator(resolved: Resolved, adapter: TraceAdapter) -> Accelerator:
    """Return the ``Accelerator`` that ``harness.worker.setup`` makes, inside of ``world``."""
    # accelerate counts processes only if a backend is named.
    launch = dataclasses.replace(resolved.launch, simulated=adapter.ranks)
    kwargs = resolved.recipe.accelerator_kwargs(launch)
    with _taken_for_cuda(resolved.spec.device):
        accelerator = Accelerator(**kwargs)
    adapter.adapt_accelerator(accelerator, resolved.launch)
    return accelerator


@contextlib.contextmanager
def _taken_for_cuda(device: str) -> Iterator[None]:
    """Patch ``Accelerator.device`` to cuda while it is made: accelerate scales losses only on
    devices that it knows by name."""
    if device != "cuda":
        yield
        return
    with mock.patch.object(Accelerator, "device", torch.device("cuda")):
        yield


# ---- Memory pool history ----
# Models that a GPU held before the training, and whose memory torch's cache kept. Trainers that
# encode texts and samples first often do not empty the cache, or empty it while the encoders are
# still referenced. The training's tensors then reuse the segments of the encoders' weights.
# Segments of an encoder's forward pass are not modelled.


@functools.cache
def sizes(before: str) -> tuple[int, ...]:
    """Return the bytes of each tensor of the models in a spec's ``before``, in ``Module.to``'s
    order.

    A model given only by its size is one tensor.

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
    """Allocate and free tensors ``of`` these bytes on the GPU, so that the pool keeps their
    segments."""
    held = [torch.empty(size, dtype=torch.uint8, device=GPU) for size in of]
    held.clear()


def built(name: str) -> torch.nn.Module:
    """Return a model of the table of encoders (``resident_models``), without memory."""
    row = resident_models.table()[name]
    with torch.device("meta"):
        if row["class"].startswith("Autoencoder"):
            import diffusers

            return getattr(diffusers, row["class"])(**row["config"])
        import transformers

        kind = getattr(transformers, row["class"])
        return kind(kind.config_class(**row["config"]))


def moved(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield each tensor once, in the order of ``Module.to``: a module's children first, then its
    own parameters and buffers (torch 2.13, torch/nn/modules/module.py, ``_apply``)."""
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
    """Return the bytes of one tensor; a buffer keeps its dtype."""
    is_weight = isinstance(tensor, torch.nn.Parameter)
    return max(1, int(tensor.numel() * width)) if is_weight else tensor.nbytes
