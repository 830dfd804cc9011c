"""What shows that ranks share weights: what each holds, heads inside attention, sums around each
half of a block, and blocks that compute what whole ones do.

Imports torch: import it only where it is there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from strategies import initial
from strategies.base import demand
from strategies.engine import Trained
from strategies.evidence.together import together
from strategies.parallel.sequence.effects import attention_operands
from strategies.parallel.tensor import gathering, products, sums
from strategies.parallel.tensor.beside_blocks import LAYERS, as_whole_blocks
from strategies.parallel.tensor.shares import share_of

__all__ = ["evidence"]


def evidence(trained: Trained, *, by_tokens: bool) -> dict[str, Any]:
    """Facts of what is held, of the watched step, and of blocks beside whole ones; every rank takes
    part. ``by_tokens``: between the products each is to have some of the tokens alone.

    Raises:
        NotInForce: some of it is not so.
    """
    facts = together(trained, lambda: _seen(trained, by_tokens=by_tokens))
    if trained.launch.simulated:  # nobody is there who has the other parts
        demand(trained.observed is not None, "nothing of it was seen")
        return facts
    alike = together(trained, lambda: _alike(trained))
    return facts | alike | as_whole_blocks(trained)


def _seen(trained: Trained, *, by_tokens: bool) -> dict[str, Any]:
    layout = trained.launch.layout
    facts: dict[str, Any] = {"ranks_a_weight": layout.tensor, "data_parallel": layout.data}
    facts |= _held(trained)
    if trained.observed is not None and trained.observed.ran:
        facts |= _attended(trained) | sums.exchanged(trained, by_tokens)
        facts |= sums.between(trained) if by_tokens else {}
    return facts


def _held(trained: Trained) -> dict[str, Any]:
    """The cut layers hold a part of what the subject's own have, and nothing else is cut."""
    parts, subject = trained.launch.layout.tensor, trained.subject
    with initial.valueless():
        plain = subject.make()
    mine = total = 0
    for block, whole in zip(trained.blocks(), subject.blocks(plain), strict=True):
        for name, axis in LAYERS.items():
            shape = list(whole.get_submodule(name).weight.shape)
            shape[axis] //= parts
            found = list(block.get_submodule(name).weight.shape)
            demand(found == shape, f"{name} is {found}, not {shape}")
        mine += sum(p.numel() for p in block.parameters())
        total += sum(p.numel() for p in whole.parameters())
    demand(len(products.layers(trained.module)) == len(LAYERS) * len(trained.blocks()), "more cut")
    return {"share_of_a_block": round(mine / total, 4)}


def _attended(trained: Trained) -> dict[str, Any]:
    """Heads of all of torch's attention in the step."""
    parts = trained.launch.layout.tensor
    wanted = {(a.heads // parts, a.queries, a.keys) for a in trained.subject.survey.attention}
    found = attention_operands(trained)
    if not found:  # written out in products: the blocks beside whole ones tell
        return {}
    told = f"attention had heads, queries and keys {sorted(found)}, not {sorted(wanted)}"
    demand(found == wanted, told)
    return {"heads_inside": max(heads for heads, *_ in wanted)}


def _alike(trained: Trained) -> dict[str, Any]:
    """What is whole is the same on all ranks, since each had all of its gradient."""
    group = gathering.group_of(trained.module)
    with torch.no_grad():
        alike = [p for p in trained.module.parameters() if share_of(p) is None]
        each = [trained.engine.part(p).double().sum() for p in alike]
    most, least = torch.stack(each), torch.stack(each)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    spread = float((most - least).abs().max())
    demand(spread == 0.0, f"whole weights drifted apart by {spread:.3g} among those who share")
    return {"spread_of_whole_weights": spread}
