"""Process groups of ranks that share weights, and the engines' view of such weights.

No torch at import: engines import this module in the launching process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from strategies.engine import TrainingRun


class Groups(NamedTuple):
    """The groups of one rank: ``parts`` are its neighbours, which hold the other parts of its
    weights; ``alike`` are the ranks of other neighbourhoods that hold the same parts."""

    parts: Any
    alike: Any


def made(parts: int, ranks: int) -> Groups:
    """Make the groups of this rank, of ``ranks`` in neighbourhoods of ``parts``; all ranks call
    it."""
    import torch.distributed as dist

    together = [[*range(first, first + parts)] for first in range(0, ranks, parts)]
    alike = [[*range(index, ranks, parts)] for index in range(parts)]
    return Groups(*(dist.new_subgroups_by_enumeration(cut)[0] for cut in (together, alike)))


class Among:
    """Replaces accelerate's ``DistributedDataParallelKwargs``: the same, and the ``group`` over
    which DDP averages gradients, which accelerate cannot set."""

    def __init__(self, usual: Any, group: Any) -> None:
        self.usual, self.group = usual, group

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of DDP."""
        return {**(self.usual.to_kwargs() if self.usual else {}), "process_group": self.group}

    def register_comm_hook(self, model: Any) -> None:
        """Register accelerate's hook, if there is one."""
        if self.usual:
            self.usual.register_comm_hook(model)


def gatherer(trained: TrainingRun) -> Any:
    """Return the module that gathers tensor-parallel weights; None if the run has none."""
    if trained.launch.layout.tensor == 1:
        return None
    from strategies.parallel.tensor import saving

    return saving


def whole_shape(parameter: Any) -> Any:
    """Return the shape of the whole parameter that ``parameter`` is, or is a share of."""
    return parameter.share.shape if hasattr(parameter, "share") else parameter.shape
