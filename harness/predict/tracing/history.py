"""A pool's history: models that a GPU held before the training, freed while torch's cache kept
their memory.

Trainers that first encode texts and samples often empty the cache while something still refers to
the encoders, or do not empty it at all: the segments of the encoders' weights then stay in the
pool, and the training's tensors are put into them. What an encoder's forward leaves is not here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from harness.predict import beside
from harness.predict.tracing.world import GPU

__all__ = ["leave", "sizes"]


@functools.cache
def sizes(before: str) -> tuple[int, ...]:
    """Bytes of each tensor of the models that a spec's ``before`` names, in the order in which
    ``Module.to`` moves them; one of a size alone is one tensor.

    Raises:
        BadInput: an unknown name.
    """
    found: list[int] = []
    for word in filter(None, before.split(",")):
        one = beside.named(word, "before")
        name, _, stored = one.name.partition(":")
        if name in beside.table():
            width = beside.BYTES[stored or beside.STORED]
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
    row = beside.table()[name]
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
