"""What every stage of a pipeline has: weights in front of the blocks, of a model that runs these
in a forward pass of its own, computed with again on every stage.

Each stage's gradients of them are of what its own blocks were given: the sum over the stages is the
whole model's. Stages then step them alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from strategies.base import demand
from strategies.engines.fsdp import rows

if TYPE_CHECKING:
    from strategies.engine import Trained

__all__ = ["added_up", "evidence", "norm", "size"]


def added_up(trained: Trained, over: int) -> None:
    """Have each gradient of what is shared be the whole model's, on every stage; those that are
    there are sums over so many micro batches."""
    model = trained.model
    common = model.cut.common(trained.module)
    for p in common:
        if p.grad is None:  # its values went to another stage's blocks alone
            p.grad = torch.zeros_like(p)
    here = [part for part in map(trained.engine.part, (p.grad for p in common)) if part.numel()]
    if here:
        model.places.add_up(here, over)


def norm(trained: Trained) -> Any:
    """The norm of the gradients that this stage tells of."""
    named = trained.module.named_parameters()
    own = [p.grad for n, p in named if p.grad is not None and trained.model.cut.tells(n)]
    return rows.whole(torch.nn.utils.get_total_norm(own))


def size(trained: Trained) -> int:
    """Bytes of gradients that this rank adds up in a step."""
    return sum(trained.engine.part(p).nbytes for p in trained.model.cut.common(trained.module))


def evidence(trained: Trained) -> dict[str, Any]:
    """What all stages have: their gradients were added up in a step, all and once, stages hold the
    same after the last one, and the blocks of others were stood in for.

    Raises:
        NotInForce: some of it is not so.
    """
    model = trained.model
    if not model.cut.shared:
        return {}
    mine = [trained.engine.part(p).detach().double().sum().item() for p in _held(trained)]
    each = model.places.everyone(mine)
    facts = {"shared_elements": sum(p.numel() for p in _held(trained)), **_summed(trained)}
    demand(model.way.stood > 0 or model.cut.index == 0, "no stand-in was called")
    spread = max((abs(a - b) for own in each for a, b in zip(own, each[0], strict=True)), default=0)
    demand(spread == 0.0, f"what all stages have drifted apart by {spread:.3g}")
    return {**facts, "shared_spread": spread}


def _held(trained: Trained) -> list[torch.nn.Parameter]:
    named = trained.module.named_parameters()
    return [p for name, p in named if name in trained.model.cut.shared]


def _summed(trained: Trained) -> dict[str, Any]:
    """What was added up in the watched step: before the optimizer's turn nothing else is."""
    if trained.observed is None or not trained.observed.ran:
        return {}
    places = trained.model.places
    among = (places.pipe or dist.group.WORLD).group_name
    sums = (s for s in trained.observed.sent if s.collective == "allreduce_" and s.group == among)
    found, whole = sum(s.bytes for s in sums if s.phase != "optimizer"), size(trained)
    demand(found == whole, f"{found} bytes of shared gradients were added up, of {whole}")
    return {"shared_gradient_bytes": found}
