"""hpZ: from its forward on, each group of ranks has all weights between its members once more, so
that backward gathers them among these alone. Watched in a step: DeepSpeed drops the second share
when the optimizer has stepped.

Source: Wang et al. 2023, ZeRO++ (arXiv:2306.10209); attributes are DeepSpeed's own (0.19).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from strategies.base import demand
from strategies.engine import Trained
from strategies.engines.zero import chosen
from strategies.holdings import Maker

if TYPE_CHECKING:
    import torch

__all__ = ["evidence", "forget_group", "kept", "makers"]

GATHER = "_allgather_base_"
PADDING = 0.02


def forget_group() -> None:
    """DeepSpeed keeps the group of one training for the process, and refuses a second."""
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def kept(parameters: list[Any]) -> list[torch.Tensor]:
    """The second shares that are there now."""
    found = (getattr(p, "ds_secondary_tensor", None) for p in parameters)
    return [tensor for tensor in found if tensor is not None]


def makers() -> Iterator[Maker]:
    """The second share is a part of the weights, not something gathered."""
    from deepspeed.runtime.zero.partition_parameters import Init

    yield Maker(Init, "_partition_param_sec", "parameters")


def evidence(trained: Trained, most: int) -> dict[str, Any]:
    """``most``: elements of second shares that were there at once in the watched step. What
    backward gathered went among a group; of what trains, forward's went among all, for DeepSpeed
    leaves the second share of frozen weights alone.

    Raises:
        NotInForce: there is a second share that was not asked for, none, or one of another size.
    """
    size, ranks = chosen.group(trained.engine.zero), trained.launch.processes
    if size == 1:
        demand(most == 0, f"a second share of {most} elements was kept, and none was asked for")
        return {}
    cut = [p for p in trained.module.parameters() if not p.ds_persist]
    share = most / sum(p.ds_numel for p in cut)
    demand(
        abs(share - 1 / size) <= PADDING,
        f"this rank kept {share:.3f} of the weights for backward, {1 / size:.3f} were expected",
    )
    facts = {"second_share": round(share, 4), "ranks_that_share_again": size}
    if not trained.observed.ran:  # compiled blocks are not watched
        return facts
    among = {p: _among(trained, p) for p in ("forward", "backward")}
    told = f"weights were gathered among {among['backward']} ranks in backward"
    demand(among["backward"] == [size], f"{told}, not {size}")
    wanted = {ranks} if any(p.requires_grad for p in cut) else set()
    demand(
        wanted <= set(among["forward"]), f"{told} and {among['forward']} in forward, not {ranks}"
    )
    return facts | {"backward_gathered_among": size}


def _among(trained: Trained, phase: str) -> list[int]:
    """Sizes of the groups of ranks among which weights were gathered."""
    from torch.distributed import distributed_c10d as c10d

    seen = trained.observed.sent
    names = {s.group for s in seen if s.collective == GATHER and s.phase == phase}
    found = (c10d._resolve_process_group(name) for name in names)
    return sorted({len(c10d.get_process_group_ranks(group)) for group in found})
