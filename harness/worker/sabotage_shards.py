"""Negative controls of FSDP2: ways in which ranks that share weights can fail to be one training,
done on purpose as in ``harness.worker.sabotage``. None of them raises an error. torch's groups of
parameters are changed, for a hook on a sharded parameter would never be called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.worker.loop import Run

__all__ = ["HYBRID", "SHARDED", "SHARDS"]


def one_block_not_reduced(run: Run) -> None:
    """Of one block's gradients each rank keeps its own, of the rows that it stores."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    class OwnRows(DefaultReduceScatter):
        def __call__(
            self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
        ) -> None:
            output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])

    block = run.trained.blocks()[1]
    block.set_custom_reduce_scatter(OwnRows())


def one_block_divided_twice(run: Run) -> None:
    """One block's gradients are divided by the number of ranks once more: Adam forgives a scale."""
    ranks = run.trained.launch.layout.sharers
    run.trained.blocks()[1].set_all_reduce_hook(lambda gradients: gradients.div_(ranks))


def groups_not_averaged(run: Run) -> None:
    """Each group of ranks that share steps by its own samples' gradients."""
    import torch

    from strategies.engines.fsdp import facts

    alone, _ = torch.distributed.new_subgroups(1)
    for group in facts.groups(run.trained.module):
        group.mesh_info.replicate_process_group = alone


SHARDED: dict[str, Callable[[Run], None]] = {
    change.__name__: change for change in (one_block_not_reduced, one_block_divided_twice)
}
"""Name -> what is done to a run of ``fsdp2`` before its first step."""
HYBRID: dict[str, Callable[[Run], None]] = {groups_not_averaged.__name__: groups_not_averaged}
"""The same, of ``hsdp``."""
SHARDS = SHARDED | HYBRID
