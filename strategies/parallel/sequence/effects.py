"""What shows that ranks share samples: tokens of the blocks, heads and keys inside attention, what
was exchanged around it, and a forward pass that is the whole model's (``beside_whole``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils._pytree import tree_leaves

from strategies.base import demand
from strategies.engine import Trained
from strategies.evidence.together import together
from strategies.parallel.beside_whole import as_the_whole
from strategies.parallel.sequence import joining
from strategies.survey import Attended

__all__ = ["attention_operands", "evidence", "observe"]

ATTENTION = "aten::_scaled_dot_product_"
AROUND = ("alltoall_base_", "allgather_", "send")
"""Collectives that exchange tokens; engines use others."""


@contextlib.contextmanager
def observe(trained: Trained) -> Iterator[set[int]]:
    """Note how many tokens the blocks are given, each time that one runs: the second axis of what
    has three."""
    tokens: set[int] = set()

    def note(_: Any, given: Any, named: Any) -> None:
        leaves = (x for x in tree_leaves((given, named)) if getattr(x, "ndim", 0) == 3)
        first = next(leaves, None)
        if first is not None:
            tokens.add(first.shape[1])

    blocks = trained.blocks()
    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    try:
        yield tokens
    finally:
        for handle in handles:
            handle.remove()


def evidence(trained: Trained, tokens: set[int] | None, way: Any) -> dict[str, Any]:
    """Facts of the watched step, and of a forward pass beside the whole model's.

    Args:
        tokens: what ``observe`` noted; None where no step was watched.
        way: the kind of ``exchanges.Around`` that was asked for.

    Raises:
        NotInForce: some of it is not so.
    """
    facts = together(trained, lambda: _seen(trained, tokens, way))
    if trained.launch.simulated:  # nobody is there whose tokens could be exchanged
        demand(trained.observed is not None, "nothing of it was seen")
        return facts
    return facts | as_the_whole(trained)


def _seen(trained: Trained, tokens: set[int] | None, way: Any) -> dict[str, Any]:
    layout = trained.launch.layout
    facts: dict[str, Any] = {"ranks_a_sample": layout.sequence, "data_parallel": layout.data}
    if trained.observed is not None and trained.observed.ran:
        facts |= _tokens(trained, tokens) | _attended(trained, way) | _exchanges(trained, way)
        facts |= joining.joins(trained) if trained.sampling else {}
    return facts


def _tokens(trained: Trained, seen: set[int] | None) -> dict[str, Any]:
    share = trained.subject.dimensions.tokens // trained.launch.layout.sequence
    found = max(seen or {0})
    demand(0 < found <= share, f"blocks were given {found} tokens, more than {share}, or none")
    return {"tokens_in_blocks": found}


def _over_all_tokens(trained: Trained) -> list[Attended]:
    """The attentions of one forward whose keys are the queries' own tokens: those that are cut."""
    return [call for call in trained.subject.survey.attention if call.queries == call.keys]


def attention_operands(trained: Trained) -> set[tuple[int, int, int]]:
    """Heads, queries and keys of all of torch's attention in forward, by its operands [B, heads,
    tokens, K]; none where it is written out in products."""
    ran = [r for r in trained.observed.ran if r.name.startswith(ATTENTION)]
    seen = [r.shapes for r in ran if not r.name.endswith("_backward")]
    return {(q[1], q[2], k[2]) for q, k, *_ in seen}


def _attended(trained: Trained, way: Any) -> dict[str, Any]:
    """What torch's attention is given in forward."""
    parts, found = trained.launch.layout.sequence, attention_operands(trained)
    if not found:  # attention is written out in products: the forward pass tells
        return {}
    cut = {_inside(call, way.cut, parts) for call in _over_all_tokens(trained)}
    calls = trained.subject.survey.attention
    other = {(a.heads, a.queries // parts, a.keys) for a in calls if a.queries != a.keys}
    told = f"attention had heads, queries and keys {sorted(found)}"
    demand(cut <= found <= cut | other, f"{told}, not {sorted(cut)}")
    names = ("heads_inside", "queries_inside", "keys_inside")
    return dict(zip(names, max(cut, key=lambda shape: shape[2]), strict=True))


def _inside(call: Attended, cut: frozenset[str], parts: int) -> tuple[int, int, int]:
    """Heads, queries and keys that a rank attends with, of those that the whole ``call`` has."""
    names = ("heads", "queries", "keys")
    return tuple(getattr(call, name) // (parts if name in cut else 1) for name in names)


def _exchanges(trained: Trained, way: Any) -> dict[str, Any]:
    """Collectives around each attention in a micro batch: in forward, and as often in backward,
    where there is one; where blocks are recomputed there, once more at most."""
    sent = [s for s in trained.observed.sent if s.collective in AROUND]
    times = trained.observed.micro_steps * len(_over_all_tokens(trained))
    traits, counts = trained.launch.traits, {}
    for phase in ("forward",) if trained.sampling else ("forward", "backward"):
        low = getattr(way, f"{phase}_collectives") * times
        high = low
        if phase == "backward" and "recomputes" in traits:
            high += way.forward_collectives * times
        if phase == "backward" and "frozen_blocks" in traits:
            low = high = 0
        found = sum(s.phase == phase for s in sent)
        demand(low <= found <= high, f"{found} exchanges in {phase}, not {low} to {high}")
        counts[phase] = found / times
    size = sum(s.bytes for s in sent)
    return {"collectives_an_attention": counts, "exchanged_bytes": size}
