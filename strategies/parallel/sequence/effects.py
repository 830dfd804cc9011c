"""Evidence of sequence parallelism: tokens of the blocks, operands of attention, exchanges around
it, and an output equal to the whole model's. Imports torch.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from strategies.base import demand
from strategies.engine import TrainingRun
from strategies.evidence import states
from strategies.evidence.reference_check import away, output_of
from strategies.evidence.rules import together
from strategies.parallel.sequence import attention
from strategies.survey import Attended

ATTENTION = "aten::_scaled_dot_product_"
AROUND = ("alltoall_base_", "allgather_", "send")
"""Collectives that exchange tokens; engines use other ones."""


@contextlib.contextmanager
def observe(trained: TrainingRun) -> Iterator[set[int]]:
    """Record the number of tokens that each call of a block is given: the second axis of its first
    operand with three axes."""
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


def evidence(trained: TrainingRun, tokens: set[int] | None, way: Any) -> dict[str, Any]:
    """Return facts of the watched step, and the distance of a forward pass from the whole model's.

    Args:
        tokens: record of ``observe``; None if no step was watched.
        way: the kind of ``attention.Around`` that the recipe names.

    Raises:
        NotInForce: a fact differs from what the recipe asks for.
    """
    facts = together(trained, lambda: _seen(trained, tokens, way))
    if trained.launch.simulated:  # no rank has the other tokens
        demand(trained.observed is not None, "no step was recorded")
        return facts
    return facts | _as_the_whole(trained)


def _as_the_whole(trained: TrainingRun) -> dict[str, Any]:
    """Compare this rank's part of an output with the same part of an output that it computes
    alone."""
    with torch.no_grad(), states.eager(trained):
        mine = output_of(trained, trained.model, trained.cut)
        with _alone(trained):
            whole = output_of(trained, trained.model)
    return {"away_from_the_whole": away(trained, mine, trained.cut(whole))}


@contextlib.contextmanager
def _alone(trained: TrainingRun) -> Iterator[None]:
    """Let the model work on whole samples within the context; sharded weights are still
    gathered."""
    subject, module, layout = trained.subject, trained.module, trained.launch.layout
    subject.take_part(module, 0, 1)
    try:
        with attention.alone(module, subject):
            yield
    finally:
        part = layout.part(trained.accelerator.process_index)
        subject.take_part(module, part, layout.sequence)


def _seen(trained: TrainingRun, tokens: set[int] | None, way: Any) -> dict[str, Any]:
    layout = trained.launch.layout
    facts: dict[str, Any] = {"ranks_a_sample": layout.sequence, "data_parallel": layout.data}
    if trained.observed is not None and trained.observed.ran:
        facts |= _tokens(trained, tokens) | _attended(trained, way) | _exchanges(trained, way)
        facts |= _joins(trained) if trained.sampling else {}
    return facts


def _tokens(trained: TrainingRun, seen: set[int] | None) -> dict[str, Any]:
    share = trained.subject.dimensions.tokens // trained.launch.layout.sequence
    found = max(seen or {0})
    demand(0 < found <= share, f"blocks got {found} tokens, expected at most {share} and not 0")
    return {"tokens_in_blocks": found}


def _over_all_tokens(trained: TrainingRun) -> list[Attended]:
    """Return the attentions of one forward that are cut: those with as many keys as queries."""
    return [call for call in trained.subject.survey.attention if call.queries == call.keys]


def attention_operands(trained: TrainingRun) -> set[tuple[int, int, int]]:
    """Return (heads, queries, keys) of all of torch's attention in forward, from its operands
    [B, heads, tokens, K]; empty if attention is written out in products."""
    ran = [r for r in trained.observed.ran if r.name.startswith(ATTENTION)]
    seen = [r.shapes for r in ran if not r.name.endswith("_backward")]
    return {(q[1], q[2], k[2]) for q, k, *_ in seen}


def _attended(trained: TrainingRun, way: Any) -> dict[str, Any]:
    """Check the operands of torch's attention in forward."""
    parts, found = trained.launch.layout.sequence, attention_operands(trained)
    if not found:  # attention written out in products: the forward pass covers it
        return {}
    tensor = trained.launch.layout.tensor
    calls = [a._replace(heads=a.heads // tensor) for a in trained.subject.survey.attention]
    cut: set[Any] = {_inside(call, way.cut, parts) for call in calls if call.queries == call.keys}
    other = {(a.heads, a.queries // parts, a.keys) for a in calls if a.queries != a.keys}
    text = f"attention had heads, queries and keys {sorted(found)}"
    demand(cut <= found <= cut | other, f"{text}, expected {sorted(cut)}")
    names = ("heads_inside", "queries_inside", "keys_inside")
    largest: Any = max(cut, key=operator.itemgetter(2))
    return dict(zip(names, largest, strict=True))


def _inside(call: Attended, cut: frozenset[str], parts: int) -> tuple[int, int, int]:
    """Return a rank's heads, queries and keys in ``call``, an attention over whole samples."""
    names = ("heads", "queries", "keys")
    return tuple(getattr(call, name) // (parts if name in cut else 1) for name in names)


def _exchanges(trained: TrainingRun, way: Any) -> dict[str, Any]:
    """Count the collectives around each attention in a micro batch. Blocks that backward recomputes
    may repeat those of forward."""
    sent = [s for s in trained.observed.sent if s.collective in AROUND]
    times = trained.observed.micro_steps * len(_over_all_tokens(trained))
    traits, counts = trained.launch.traits, {}
    for phase in ("forward",) if trained.sampling else ("forward", "backward"):
        low = getattr(way, f"{phase}_collectives") * times
        high = low
        if phase == "backward" and "recomputes" in traits:
            high += way.forward_collectives * times
        if phase == "backward" and traits & {"frozen_blocks", "some_blocks"}:
            low, high = 0, high * ("frozen_blocks" not in traits)
        found = sum(s.phase == phase for s in sent)
        demand(low <= found <= high, f"{found} collectives in {phase}, expected {low} to {high}")
        counts[phase] = found / times
    size = sum(s.bytes for s in sent)
    return {"collectives_an_attention": counts, "exchanged_bytes": size}


def _joins(trained: TrainingRun) -> dict[str, int]:
    """Check that each output of the watched batch was joined once."""
    seen, calls = trained.observed, trained.observed.micro_steps
    sent = [s for s in seen.sent if s.collective == attention.JOIN and s.dtype != attention.MASK]
    demand(len(sent) == calls, f"{len(sent)} outputs were joined, expected {calls}")
    return {"joined_predictions": calls, "joined_bytes": sum(s.bytes for s in sent)}
