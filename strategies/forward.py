"""One more forward, by which evidence sees what a step computes with."""

from __future__ import annotations

import contextlib
from typing import Any

from strategies.base import Trained

__all__ = ["compute_dtype", "forward_once", "operations"]


def forward_once(trained: Trained) -> None:
    """Run the trained model on one sample of zeros, without gradients.

    Every rank takes part, because ZeRO-3 gathers parameters on the way.
    """
    import torch

    module = trained.module
    side = module.grid * module.patch_size
    device = trained.accelerator.device
    x_BCHW = torch.zeros((1, module.in_channels, side, side), device=device)
    index_B = torch.zeros(1, dtype=torch.long, device=device)
    with torch.no_grad():
        trained.model(x_BCHW, index_B, index_B, torch.zeros_like(index_B, dtype=torch.bool))


def compute_dtype(trained: Trained) -> str:
    """The type in which the model's matrix products really ran: the first qkv projection's output.

    A compiled block knows nothing of hooks that came after it, so there it is run uncompiled.
    """
    seen: list[str] = []
    qkv = trained.module.blocks[0].attn.qkv
    handle = qkv.register_forward_hook(lambda *call: seen.append(str(call[2].dtype)))
    try:
        with _eager(trained):
            forward_once(trained)
    finally:
        handle.remove()
    return seen[-1].removeprefix("torch.") if seen else "none"


def _eager(trained: Trained) -> Any:
    if "compiled" not in trained.launch.traits:
        return contextlib.nullcontext()
    import torch

    return torch.compiler.set_stance("force_eager")


def operations(trained: Trained) -> list[tuple[str, list[Any]]]:
    """Name and input shapes of every operation of one forward, in order.

    Seen by the profiler, for a dispatch mode would have compiled graphs run uncompiled.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        forward_once(trained)
    return [(event.name, event.input_shapes) for event in seen.events()]
