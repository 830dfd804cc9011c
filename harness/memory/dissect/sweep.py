"""Small models that differ in one size, for the laws of activation memory and FLOPs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from harness.memory.dissect.modules import Stack, saving
from harness.memory.portrait import Point
from strategies.evidence import flops
from strategies.subject import Subject

__all__ = ["points"]


def points(subject: Subject, device: torch.device, dtype: torch.dtype) -> Iterator[Point]:
    """Each relative of ``subject``: the bytes that autograd saves for backward, and the FLOPs of a
    training step.

    The models are plain: no sharding, no recomputation. ``dtype`` below float32 is autocast's.
    """
    for varies, small, batch in subject.relatives():
        module = small.make().to(device)
        size = small.dimensions
        yield Point(
            varies=varies,
            batch=batch,
            tokens=size.tokens,
            hidden=size.width,
            depth=size.depth,
            heads=size.heads,
            parameters=sum(p.numel() for p in module.parameters() if p.requires_grad),
            activation_bytes=_saved_bytes(small, module, batch, dtype),
            flops=_flops(small, batch),
        )


def _saved_bytes(subject: Subject, module: Any, batch: int, dtype: torch.dtype) -> int:
    device = next(module.parameters()).device
    known = {p.untyped_storage()._cdata for p in module.parameters()}
    low = dtype is not torch.float32
    with saving(Stack(module), known) as saved, torch.autocast(device.type, dtype, enabled=low):
        subject.predict(module, *_samples(subject, batch, device)).float().square().mean()
    return sum(size for _, size in saved.values())


def _flops(subject: Subject, batch: int) -> int:
    """Counted on storage-less tensors, which take attention as the products that it is."""
    with torch.device("meta"):
        module = subject.make()
        with flops.counting() as counter:
            out = subject.predict(module, *_samples(subject, batch, "meta"))
            out.square().mean().backward()
    return counter.get_total_flops()


def _samples(subject: Subject, batch: int, device: torch.device | str) -> tuple[Any, Any, Any]:
    """The subject's example, ``batch`` times over."""
    x, t_B, conditions = subject.example(device)
    many = {name: torch.cat([value] * batch) for name, value in conditions.items()}
    return torch.cat([x] * batch), torch.cat([t_B] * batch), many
