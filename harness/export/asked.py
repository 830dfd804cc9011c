"""What is exported: a recipe that can be, its numbers, and the parts of it in order. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from harness.resolve import Resolved
from strategies.base import Slot
from strategies.strategy import Strategy

__all__ = ["defaults", "numbers", "parameters", "techniques", "without_counterpart"]

WITHIN = {
    "tensor": "accelerate's parallelism_config has tp_size, for a model that its library has "
    "cut already (a transformers model's tp_plan); any other stays whole",
    "sequence": "accelerate's parallelism_config has sp_size, by DeepSpeed's attention for "
    "transformers models under DeepSpeed, and cp_size, under FSDP2; a diffusion model has neither",
    "pipeline": "accelerate's parallelism_config has no stages; torch.distributed.pipelining has, "
    "with a loop of its own",
}
"""Ways to cut a model or a sample among ranks (``strategies.layout.Layout``) that no launch file
can ask for, and what there is instead. Source: accelerate 1.15, parallelism_config.py and
accelerator.py (``_prepare_tp``, ``_prepare_deepspeed``)."""

WITHOUT_GPU = (
    "accelerate looks for FSDP on GPUs alone, and here each process would train a model by itself, "
    "without a word; give --gpu CARD"
)
"""Source: accelerate 1.15, state.py (``AcceleratorState.__init__``, below MULTI_GPU)."""


def without_counterpart(resolved: Resolved) -> str:
    """Why a recipe cannot be taken home as files and a few lines; empty if it can."""
    launch = resolved.launch
    name = next((name for name in WITHIN if getattr(launch.layout, name) > 1), None)
    if name is not None:
        why = WITHIN[name]
        return f"{resolved.recipe} cannot be exported: {why}; its code is read in strategies/"
    if launch.device == "cpu" and "dtensor_weights" in launch.traits:
        return f"{resolved.recipe} cannot be exported: {WITHOUT_GPU}"
    return ""


def techniques(resolved: Resolved) -> list[Strategy]:
    """The parts beside the sharding, in slot order: that one is its launch file."""
    return [part for part in resolved.recipe.strategies if part.slot != Slot.SHARD]


def parameters(part: Strategy) -> dict[str, Any]:
    """A part's parameters and their values."""
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}


def defaults(part: Strategy) -> dict[str, Any]:
    """A part's parameters and their defaults."""
    return {field.name: field.default for field in dataclasses.fields(part)}


def numbers(resolved: Resolved) -> dict[str, Any]:
    """The numbers of the training, by the names that tables and lines use."""
    settings, launch = resolved.settings, resolved.launch
    beta1, beta2 = settings.betas
    return {
        "micro_batch": resolved.micro_batch,
        "accumulation": launch.accumulation,
        "processes": launch.processes,
        "learning_rate": settings.learning_rate,
        "beta1": beta1,
        "beta2": beta2,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "clip": settings.grad_clip,
        "ema_decay": settings.ema_decay,
        "random_blocks": resolved.subject.random_blocks,
    }
