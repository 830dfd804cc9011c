"""What is exported: a recipe that can be, its numbers, and the parts of it in order. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from harness.resolve import Resolved
from strategies.base import Slot
from strategies.strategy import Strategy

__all__ = ["defaults", "numbers", "parameters", "techniques"]


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
