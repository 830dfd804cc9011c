"""Evidence of tensor parallelism: shares held, heads inside attention, collectives of each block,
and blocks that compute what whole blocks compute. Imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from strategies import initial
from strategies.base import demand
from strategies.engine import TrainingRun
from strategies.evidence import states
from strategies.evidence.reference_check import close_to, output_of
from strategies.evidence.rules import relative_error, together
from strategies.parallel.sequence.effects import attention_operands
from strategies.parallel.tensor.layers import (
    LAYERS,
    all_tokens,
    has_stripe,
    parallel_layers,
    share_of,
)
from strategies.parallel.tensor.saving import group_of

HALVES = 2
"""Halves of a block: attention and MLP."""
GATHER, SCATTER, SUM = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
WHOLE = {"forward": {SUM: HALVES}, "backward": {SUM: HALVES}}
"""Phase -> collectives of a block among the ranks that share its weights."""
BY_TOKENS = {
    "forward": {GATHER: HALVES, SCATTER: HALVES},
    "backward": {GATHER: 2 * HALVES, SCATTER: HALVES, SUM: 1},
}
"""The same with ``norms=tokens``: backward gathers the input of each product again, because each
rank keeps its stripe, and sums the gradients of the modulation."""


def evidence(trained: TrainingRun, *, by_tokens: bool) -> dict[str, Any]:
    """Return facts of the weights held, of the watched step and of a comparison with whole blocks;
    every rank takes part. ``by_tokens``: each rank is to have a stripe between the halves.

    Raises:
        NotInForce: a fact differs from what the recipe asks for.
    """
    facts = together(trained, lambda: _seen(trained, by_tokens=by_tokens))
    if trained.launch.simulated:  # no rank has the other parts
        demand(trained.observed is not None, "no step was recorded")
        return facts
    alike = together(trained, lambda: _alike(trained))
    return facts | alike | _as_whole_blocks(trained)


def _seen(trained: TrainingRun, *, by_tokens: bool) -> dict[str, Any]:
    layout = trained.launch.layout
    facts: dict[str, Any] = {"ranks_a_weight": layout.tensor, "data_parallel": layout.data}
    facts |= _held(trained)
    if trained.observed is not None and trained.observed.ran:
        facts |= _attended(trained) | _exchanged(trained, by_tokens)
        facts |= _between(trained) if by_tokens else {}
    return facts


def _held(trained: TrainingRun) -> dict[str, Any]:
    """Check the shapes of the cut layers against the plain model's, and their number."""
    parts, subject = trained.launch.layout.tensor, trained.subject
    with initial.valueless():
        plain = subject.make()
    mine = total = 0
    for block, whole in zip(trained.blocks(), subject.blocks(plain), strict=True):
        for name, axis in LAYERS.items():
            shape = list(whole.get_submodule(name).weight.shape)
            shape[axis] //= parts
            found = list(block.get_submodule(name).weight.shape)
            demand(found == shape, f"{name} has shape {found}, expected {shape}")
        mine += sum(p.numel() for p in block.parameters())
        total += sum(p.numel() for p in whole.parameters())
    cut, wanted = len(parallel_layers(trained.module)), len(LAYERS) * len(trained.blocks())
    demand(cut == wanted, f"{cut} layers are sharded, expected {wanted}")
    return {"share_of_a_block": round(mine / total, 4)}


def _attended(trained: TrainingRun) -> dict[str, Any]:
    """Check the heads, queries and keys of torch's attention in the watched step."""
    if "cut_samples" in trained.launch.traits:  # sp's evidence checks them: it cuts them further
        return {}
    parts = trained.launch.layout.tensor
    wanted = {(a.heads // parts, a.queries, a.keys) for a in trained.subject.survey.attention}
    found = attention_operands(trained)
    if not found:  # attention written out in products: the comparison with whole blocks covers it
        return {}
    demand(
        found == wanted,
        f"attention had heads, queries and keys {sorted(found)}, expected {sorted(wanted)}",
    )
    return {"heads_inside": max(heads for heads, *_ in wanted)}


def _alike(trained: TrainingRun) -> dict[str, Any]:
    """Check that whole weights are equal on all ranks of the group."""
    group = group_of(trained.module)
    with torch.no_grad():
        alike = [p for p in trained.module.parameters() if share_of(p) is None]
        each = [trained.engine.part(p).tensor.double().sum() for p in alike]
    most, least = torch.stack(each), torch.stack(each)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    spread = float((most - least).abs().max())
    demand(spread == 0.0, f"unsharded weights differ by {spread:.3g} between ranks of a group")
    return {"spread_of_whole_weights": spread}


# ---- collectives ----


def _exchanged(trained: TrainingRun, by_tokens: bool) -> dict[str, Any]:
    """Count the group's collectives of each block and micro batch. Blocks that backward recomputes
    repeat those of forward."""
    group = group_of(trained.module).group_name
    sent = [s for s in trained.observed.sent if s.group == group]
    micro = trained.observed.micro_steps
    blocks, again = len(trained.blocks()) * micro, "recomputes" in trained.launch.traits
    counts: dict[str, dict[str, float]] = {}
    for phase, each in (BY_TOKENS if by_tokens else WHOLE).items():
        for kind, times in each.items():
            found = sum(s.phase == phase and s.collective == kind for s in sent)
            # One more gather a phase: behind the last block, or in front of it in backward.
            found -= micro * (kind == GATHER)
            more = again and phase == "backward" and found > times * blocks
            text = (
                f"{found} calls of {kind} in {phase}, expected {times} in each of {blocks} blocks"
            )
            demand(found == times * blocks or more, text)
            name = {GATHER: "gathers_a_block", SUM: "sums_a_block"}.get(kind, "scatters_a_block")
            counts.setdefault(name, {})[phase] = found / blocks
    size = sum(s.bytes for s in sent if s.phase in WHOLE)
    return {**counts, "exchanged_bytes" if by_tokens else "summed_bytes": size}


def _between(trained: TrainingRun) -> dict[str, Any]:
    """Count the tokens that the blocks' norms have in forward; the final layer's has all."""
    layout, blocks = trained.launch.layout, len(trained.blocks())
    own = trained.subject.dimensions.tokens // (layout.tensor * layout.sequence)
    norms = [r for r in trained.observed.ran if "layer_norm" in r.name and r.phase == "forward"]
    found = sum(r.shapes[0][1] == own for r in norms)
    wanted = HALVES * blocks * trained.observed.micro_steps
    demand(found == wanted, f"{found} norms had {own} tokens, expected {wanted}")
    return {"tokens_between": own}


# ---- a block beside the same block with whole weights ----


def _as_whole_blocks(trained: TrainingRun) -> dict[str, Any]:
    """Return the largest distance of a block's output from that of the same block with whole
    weights. It covers the order of heads and every sum. One block is whole at a time."""
    given: list[Any] = []
    blocks = trained.blocks()
    handles = [b.register_forward_hook(_keep(given), with_kwargs=True) for b in blocks]
    try:
        with torch.no_grad(), states.eager(trained):
            output_of(trained, trained.model, trained.cut)
    finally:
        for handle in handles:
            handle.remove()
    away = 0.0
    for block, args, named, out in map(_of_all_tokens, given):
        with torch.no_grad(), trained.accelerator.autocast(), _whole(block, trained):
            wanted = block(*args, **named)
        if isinstance(block, FSDPModule):  # only a forward of the whole model would reshard it
            block.reshard()
        away = max(away, relative_error(out.double(), wanted.double()))
    close = close_to(trained, given[-1][-1].dtype)
    demand(
        away <= close,
        f"a block's output differs from that of an unsharded block by {away:.2g} (relative)",
    )
    return {"away_from_whole_blocks": float(f"{away:.2g}")}


def _of_all_tokens(call: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Gather input and output of a block that was given a stripe of the tokens."""
    block, (x, *args), named, out = call
    if has_stripe(block):
        group = block.attn.qkv.group
        x, out = all_tokens(x, group), all_tokens(out, group)
    return block, (x, *args), named, out


def _keep(given: list[Any]) -> Any:
    return lambda block, args, named, out: given.append((block, args, named, out))


@contextlib.contextmanager
def _whole(block: Any, trained: TrainingRun) -> Iterator[None]:
    """Give the block plain layers with whole weights within the context."""
    cut = {name: block.get_submodule(name) for name in LAYERS}
    heads = block.attn.num_heads
    for name, layer in cut.items():
        block.set_submodule(name, _plain(layer, trained))
    block.attn.num_heads = heads * cut["attn.qkv"].weight.share.parts
    try:
        yield
    finally:
        block.attn.num_heads = heads
        for name, layer in cut.items():
            block.set_submodule(name, layer)


def _plain(layer: Any, trained: TrainingRun) -> nn.Linear:
    """Return an ordinary layer with the weights of all ranks."""
    mine = [p for p in (layer.weight, layer.bias) if p is not None]
    weight, *bias = (p.detach() for p in trained.engine.whole(trained, mine))
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.bias = nn.Parameter(bias[0], requires_grad=False) if bias else None
    return plain
