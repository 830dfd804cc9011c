"""The process groups of ranks that cut weights: who has the other parts, and who has the same.

Imports torch: import it only where it is there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist

__all__ = ["Among", "Groups", "made"]


class Groups(NamedTuple):
    """Of one rank: ``parts`` are its neighbours, who hold the other parts of its weights, ``alike``
    those of other neighbourhoods who hold the same ones."""

    parts: Any
    alike: Any


def made(parts: int, ranks: int) -> Groups:
    """The groups of this rank, of so many ``ranks`` in neighbourhoods of ``parts``; all call it."""
    together = [[*range(first, first + parts)] for first in range(0, ranks, parts)]
    alike = [[*range(index, ranks, parts)] for index in range(parts)]
    return Groups(*(dist.new_subgroups_by_enumeration(cut)[0] for cut in (together, alike)))


class Among:
    """In the place of accelerate's settings of DDP (``DistributedDataParallelKwargs``): the same,
    and the ``group`` among which gradients are averaged, which those do not know."""

    def __init__(self, usual: Any, group: Any) -> None:
        self.usual, self.group = usual, group

    def to_kwargs(self) -> dict[str, Any]:
        """What DDP is made with."""
        return {**(self.usual.to_kwargs() if self.usual else {}), "process_group": self.group}

    def register_comm_hook(self, model: Any) -> None:
        """As accelerate's."""
        if self.usual:
            self.usual.register_comm_hook(model)
