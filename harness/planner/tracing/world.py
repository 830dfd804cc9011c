"""One rank of N in a trace: its environment and fake process group, and encoders without memory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from unittest import mock

import torch
from accelerate import Accelerator

from harness.launch import command
from harness.planner import resident_models
from harness.planner.adapters.base import TraceAdapter
from harness.resolve import Resolved

GPU = "meta"
"""Device type that represents the GPU. Its tensors have no storage, and it differs from the
CPU's."""


@contextlib.contextmanager
def world(resolved: Resolved, adapter: TraceAdapter) -> Iterator[None]:
    """Enter the environment and process group in which ``Accelerator`` finds the launch's
    settings."""
    with mock.patch.dict(os.environ, environment(resolved, adapter)):
        if adapter.ranks:
            # The store exists only in this private module of torch; torchtitan uses it too.
            from torch.testing._internal.distributed.fake_pg import FakeStore

            place = {"rank": adapter.rank, "world_size": resolved.spec.processes}
            torch.distributed.init_process_group("fake", store=FakeStore(), **place)
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
    # Made on "cuda": accelerate scales losses only on devices that it knows by name.
    taken = mock.patch.object(Accelerator, "device", torch.device("cuda"))
    with taken if resolved.spec.device == "cuda" else contextlib.nullcontext():
        accelerator = Accelerator(**kwargs)
    adapter.adapt_accelerator(accelerator, resolved.launch)
    return accelerator


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
