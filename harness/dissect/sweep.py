"""Small models that differ in one size, for the laws of activation memory and FLOPs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from harness.dissect.modules import Stack, saving
from harness.model import DiT
from harness.portrait import Point

__all__ = ["points"]

PATCH, CHANNELS, CLASSES = 2, 4, 10


@dataclass(frozen=True)
class Size:
    """A small DiT and its batch; heads have 64 units, as in the presets but XL."""

    batch: int = 2
    depth: int = 4
    grid: int = 8
    hidden: int = 256

    @property
    def heads(self) -> int:
        return self.hidden // 64


VARIED = {
    "batch": [Size(batch=n) for n in (1, 2, 4, 8)],
    "depth": [Size(depth=n) for n in (1, 2, 4, 8)],
    "tokens": [Size(grid=n) for n in (4, 8, 12, 16)],
    "width": [Size(hidden=n) for n in (128, 256, 384, 512)],
}


def points(device: torch.device, dtype: torch.dtype) -> Iterator[Point]:
    """Each size: the bytes that autograd saves for backward, and the FLOPs of a training step.

    The models are plain: no sharding, no recomputation. ``dtype`` below float32 is autocast's.
    """
    for varies, sizes in VARIED.items():
        for size in sizes:
            yield dataclasses.replace(_measured(size, device, dtype), varies=varies)


def _measured(size: Size, device: torch.device, dtype: torch.dtype) -> Point:
    side = size.grid * PATCH
    model = _model(size).to(device)
    x_BCHW = torch.ones(size.batch, CHANNELS, side, side, device=device)
    index_B = torch.zeros(size.batch, dtype=torch.long, device=device)
    known = {p.untyped_storage()._cdata for p in model.parameters()}
    low = dtype is not torch.float32
    with saving(Stack(model), known) as saved, torch.autocast(device.type, dtype, enabled=low):
        model(x_BCHW, index_B, index_B).float().square().mean()
    kept = sum(size for _, size in saved.values())
    return Point(
        varies="",
        batch=size.batch,
        tokens=size.grid**2,
        hidden=size.hidden,
        depth=size.depth,
        heads=size.heads,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        activation_bytes=kept,
        flops=_flops(size),
    )


def _flops(size: Size) -> int:
    """Counted on storage-less tensors, which take attention as the products that it is."""
    with torch.device("meta"):
        model = _model(size)
        x_BCHW = torch.empty(size.batch, CHANNELS, size.grid * PATCH, size.grid * PATCH)
        index_B = torch.empty(size.batch, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(x_BCHW, index_B, index_B).square().mean().backward()
    return counter.get_total_flops()


def _model(size: Size) -> DiT:
    return DiT(
        size.grid * PATCH, PATCH, CHANNELS, size.hidden, size.depth, size.heads, num_classes=CLASSES
    )
