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
from strategies.parallel import gathering, products
from strategies.parallel.beside_blocks import LAYERS, as_whole_blocks
from strategies.parallel.sequence_effects import attention_operands
from strategies.parallel.shares import share_of

__all__ = ["evidence"]

HALVES = 2
"""Of a block: attention and MLP, each summed once in forward and once in backward."""


GATHER, SCATTER, SUM = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
WHOLE = {"forward": {SUM: HALVES}, "backward": {SUM: HALVES}}
"""Phase -> collectives in a block among those who share weights."""
BY_TOKENS = {
    "forward": {GATHER: HALVES, SCATTER: HALVES},
    "backward": {GATHER: 2 * HALVES, SCATTER: HALVES, SUM: 1},
}
"""The same where each has some of the tokens: in backward what went into a product is gathered
again, for it was kept as each rank's own, and the gradients of the modulation are summed."""
EDGE = {GATHER: 1}
"""Beside those of the blocks: behind the last in forward, before the first in backward."""


def evidence(trained: Trained, *, by_tokens: bool) -> dict[str, Any]:
    """Facts of what is held, of the watched step, and of blocks beside whole ones; every rank takes
    part. ``by_tokens``: between the products each is to have some of the tokens alone.

    Raises:
        NotInForce: some of it is not so.
    """
    layout = trained.launch.layout
    facts: dict[str, Any] = {"ranks_a_weight": layout.tensor, "data_parallel": layout.data}
    facts |= _held(trained)
    if trained.observed is not None and trained.observed.ran:
        facts |= _attended(trained) | _exchanged(trained, by_tokens)
        facts |= _between(trained) if by_tokens else {}
    if trained.launch.simulated:  # nobody is there who has the other parts
        demand(trained.observed is not None, "nothing of it was seen")
        return facts
    return facts | _alike(trained) | as_whole_blocks(trained)


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


def _exchanged(trained: Trained, by_tokens: bool) -> dict[str, Any]:
    """Collectives among the ranks that share weights, a block and micro batch; blocks that are
    recomputed in backward have those of forward as often again as they are."""
    group = gathering.group_of(trained.module).group_name
    sent = [s for s in trained.observed.sent if s.group == group]
    micro = trained.observed.micro_steps
    blocks, again = len(trained.blocks()) * micro, "recomputes" in trained.launch.traits
    counts: dict[str, dict[str, float]] = {"sums_a_block": {}}
    for phase, each in (BY_TOKENS if by_tokens else WHOLE).items():
        for kind, times in each.items():
            edge = EDGE.get(kind, 0) * micro
            found = sum(s.phase == phase and s.collective == kind for s in sent) - edge
            more = again and phase == "backward" and found > times * blocks
            told = f"{found} of {kind} in {phase}, not {times} in each of {blocks} blocks"
            demand(found == times * blocks or more, told)
            name = {GATHER: "gathers_a_block", SUM: "sums_a_block"}.get(kind, "scatters_a_block")
            counts.setdefault(name, {})[phase] = found / blocks
    size = sum(s.bytes for s in sent if s.phase in WHOLE)
    return {**counts, "exchanged_bytes" if by_tokens else "summed_bytes": size}


def _between(trained: Trained) -> dict[str, Any]:
    """Tokens that the blocks' norms were given in forward; the final layer's has all."""
    parts, blocks = trained.launch.layout.tensor, len(trained.blocks())
    own = trained.subject.dimensions.tokens // parts
    norms = [r for r in trained.observed.ran if "layer_norm" in r.name and r.phase == "forward"]
    found = sum(r.shapes[0][1] == own for r in norms)
    wanted = HALVES * blocks * trained.observed.micro_steps
    demand(found == wanted, f"{found} norms were of {own} tokens, not {wanted}")
    return {"tokens_between": own}


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
