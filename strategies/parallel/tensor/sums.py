"""What ranks that share weights exchanged in a watched step, a block: sums of all tokens, or tokens
gathered and each rank's own summed."""

from __future__ import annotations

from typing import Any

from strategies.base import demand
from strategies.engine import Trained
from strategies.parallel.tensor import gathering

__all__ = ["between", "exchanged"]

HALVES = 2
"""Of a block: attention and MLP, each summed once in forward and once in backward."""


GATHER, SCATTER, SUM = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
WHOLE = {"forward": {SUM: HALVES}, "backward": {SUM: HALVES}}
"""Phase -> collectives in a block among those who share weights."""
BY_TOKENS = {
    "forward": {GATHER: HALVES, SCATTER: HALVES},
    "backward": {GATHER: 2 * HALVES, SCATTER: HALVES, SUM: 1},
}
"""The same where each has some of the tokens: backward gathers what went into a product again, for
it was kept as each rank's own, and sums the gradients of the modulation."""


def exchanged(trained: Trained, by_tokens: bool) -> dict[str, Any]:
    """Collectives among the ranks that share weights, a block and micro batch; blocks that are
    recomputed in backward have those of forward as often again as they are."""
    sent = [
        s for s in trained.observed.sent if s.group == gathering.group_of(trained.module).group_name
    ]
    micro = trained.observed.micro_steps
    blocks, again = len(trained.blocks()) * micro, "recomputes" in trained.launch.traits
    counts: dict[str, dict[str, float]] = {}
    for phase, each in (BY_TOKENS if by_tokens else WHOLE).items():
        for kind, times in each.items():
            found = sum(s.phase == phase and s.collective == kind for s in sent)
            found -= micro * (kind == GATHER)  # beside the blocks': behind the last, or back there
            more = again and phase == "backward" and found > times * blocks
            told = f"{found} of {kind} in {phase}, not {times} in each of {blocks} blocks"
            demand(found == times * blocks or more, told)
            name = {GATHER: "gathers_a_block", SUM: "sums_a_block"}.get(kind, "scatters_a_block")
            counts.setdefault(name, {})[phase] = found / blocks
    size = sum(s.bytes for s in sent if s.phase in WHOLE)
    return {**counts, "exchanged_bytes" if by_tokens else "summed_bytes": size}


def between(trained: Trained) -> dict[str, Any]:
    """Tokens that the blocks' norms were given in forward; the final layer's has all."""
    parts, blocks = trained.launch.layout.tensor, len(trained.blocks())
    own = trained.subject.dimensions.tokens // parts
    norms = [r for r in trained.observed.ran if "layer_norm" in r.name and r.phase == "forward"]
    found = sum(r.shapes[0][1] == own for r in norms)
    wanted = HALVES * blocks * trained.observed.micro_steps
    demand(found == wanted, f"{found} norms were of {own} tokens, not {wanted}")
    return {"tokens_between": own}
