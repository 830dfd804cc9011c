"""What is planned of a public model on several nodes where no recipes are named: the ways to share
its weights, its samples and its blocks, each as wide as the nodes and the model allow."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["recipes"]

WHOLE = "+bf16+checkpoint"
ALIKE = [
    "ddp+bf16_pure+lora:rank=16+checkpoint",
    f"zero3{WHOLE}",
    f"fsdp2{WHOLE}",
]
"""Those that take any number of GPUs."""
SHARING = (8, 4, 2)
"""Of so many ranks, the first that a model can be cut for, samples are shared."""
STAGES = (8, 4)
"""Stages, as many as a node's GPUs or half of them: each is a row."""


def recipes(gpus: int, node: int, refused: Callable[[str], bool]) -> list[str]:
    """Recipes for so many ``gpus``, ``node`` of them in each machine; ``refused``: whether a recipe
    cannot be. Where all ranks that would share samples are refused, the last is named."""
    shared = [f"fsdp2+sp:ranks={ranks}{WHOLE}" for ranks in SHARING if ranks <= node]
    staged = [n for n in STAGES if n <= node and gpus % n == 0]
    found = [*ALIKE, f"hsdp:replicate={gpus // node}{WHOLE}"]
    found += [next((text for text in shared if not refused(text)), shared[-1])] if shared else []
    # One sample a GPU: as many micro batches pass as there are stages.
    return found + [f"pp:stages={n},micro={n}{WHOLE}" for n in staged]
