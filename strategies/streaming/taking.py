"""Weights taken out of a model before it is moved to the device, and what was not there yet kept
where it is drawn.

Imports torch: import it where torch is there.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from torch import Tensor, nn

from strategies import initial
from strategies.streaming.weights import Taken

__all__ = ["stay_on_host", "take_out"]


def stay_on_host(block: nn.Module) -> None:
    """What of ``block`` has no value yet is to stay in host memory when it comes."""
    for p in block.parameters():
        waits = initial.pending(p)
        if waits is not None and waits.keep is None:
            p.pending = dataclasses.replace(waits, keep=_as_it_is)


def _as_it_is(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=values.is_floating_point())


def take_out(module: nn.Module, blocks: Iterable[nn.Module], *, frozen: bool) -> None:
    """Take the weights of ``blocks`` out of the model, so that nobody moves it with them; they wait
    as ``swapped`` of their block. ``frozen``: those alone that take no gradient. What several
    layers share stays."""
    users = Counter(id(p) for m in module.modules() for p in m._parameters.values())
    for block in blocks:
        block.swapped = [
            Taken(owner, name, p)
            for owner in block.modules()
            for name, p in owner._parameters.items()
            if p is not None and users[id(p)] == 1 and not (frozen and p.requires_grad)
        ]
        for owner, name, _ in block.swapped:
            owner._parameters[name] = None
