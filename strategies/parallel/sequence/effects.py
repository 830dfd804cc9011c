"""Evidence of sequence parallelism from one watched step: heads and tokens inside attention, and
the all-to-alls around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strategies.base import demand
from strategies.evidence.rules import together
from strategies.parallel.sequence import attention

if TYPE_CHECKING:
    from strategies.engine import TrainingRun

ATTENTION = "aten::_scaled_dot_product_"


def evidence(run: TrainingRun) -> dict[str, Any]:
    """Return facts of the watched step.

    Raises:
        NotInForce: a fact differs from what the recipe asks for.
    """
    if not run.observed.ran:
        return {}
    return together(run, _inside, _exchanges)


def _inside(run: TrainingRun) -> dict[str, Any]:
    """Check that torch's attention had a share of the heads and all tokens. Attention to text that
    each rank has whole keeps its heads."""
    ran = [r for r in run.observed.ran if r.name.startswith(ATTENTION)]
    seen = [r.shapes for r in ran if not r.name.endswith("_backward")]
    found = {(q[1], q[2], k[2]) for q, k, *_ in seen}  # of operands [B, heads, tokens, K]
    if not found:  # attention written out in products: the all-to-alls tell
        return {}
    layout = run.launch.layout
    parts, lengths, other = layout.sequence, set(), set()
    for call in run.subject.survey.attention:
        mine, queries, keys = call.heads // layout.tensor, call.queries, call.keys
        if queries == keys:
            lengths.add((mine // parts, queries, keys))
        else:
            other.add((mine, queries // parts, keys))
    text = f"attention had heads, queries and keys {sorted(found)}"
    demand(lengths <= found <= lengths | other, f"{text}, expected {sorted(lengths)}")
    heads, tokens, _ = max(lengths, key=lambda sizes: sizes[1])
    return {"heads_inside": heads, "tokens_inside": tokens}


def _exchanges(run: TrainingRun) -> dict[str, Any]:
    """Count the all-to-alls around each attention of a micro batch. Blocks that backward recomputes
    may repeat those of forward."""
    calls = [a for a in run.subject.survey.attention if a.queries == a.keys]
    times = run.observed.micro_steps * len(calls)
    traits, counts = run.launch.traits, {}
    sent = [s.phase for s in run.observed.sent if s.collective == "alltoall_base_"]
    for phase in ("forward", "backward"):
        low = high = attention.COLLECTIVES * times
        if phase == "backward" and "recomputes" in traits:
            high *= 2
        if phase == "backward" and traits & {"frozen_blocks", "some_blocks"}:
            low, high = 0, high * ("frozen_blocks" not in traits)
        found = sent.count(phase)
        demand(low <= found <= high, f"{found} all-to-alls in {phase}, expected {low} to {high}")
        counts[phase] = found / times
    return {"exchanges_an_attention": counts}
