"""Evidence of tensor parallelism: shares held, heads inside attention, collectives of each block,
and blocks that compute what whole blocks compute. Imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from strategies import initial
from strategies.base import demand
from strategies.engine import TrainingRun
from strategies.evidence import states
from strategies.evidence.reference_check import close_to, output_of
from strategies.evidence.rules import relative_error, together
from strategies.parallel.sequence.effects import attention_operands
from strategies.parallel.tensor.layers import (
    ColumnParallel,
    ParallelLinear,
    RowParallel,
    all_tokens,
    has_stripe,
    parallel_layers,
    per_head,
    share_of,
)
from strategies.parallel.tensor.products import products, scale_sizes
from strategies.parallel.tensor.saving import group_of

HALVES = 2
"""Halves of a block of this project's DiT: attention and MLP."""
GATHER, SCATTER, SUM = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
BY_TOKENS = {
    "forward": {GATHER: HALVES, SCATTER: HALVES},
    "backward": {GATHER: 2 * HALVES, SCATTER: HALVES, SUM: 1},
}
"""Phase -> collectives of a block with ``norms=tokens``: backward gathers the input of each product
again, because each rank keeps its stripe, and sums the gradients of the modulation."""


class Watch:
    """Sums that the cut layers of a step need, counted from what passes through the layers.

    One in forward for each output of a last layer. One in backward for each input of first layers
    that a gradient reaches, and for each attention with norms of its heads.
    """

    def __init__(self) -> None:
        self.outputs = self.inputs = 0
        self.x: Any = None
        self.reached: set[int] = set()

    @property
    def sums(self) -> dict[str, int]:
        """Return phase -> number of sums."""
        return {"forward": self.outputs, "backward": len(self.reached)}

    def first(self, layer: Any, given: Any, out: Any) -> None:
        """Note a call of a column-parallel layer."""
        if given[0] is not self.x:
            self.x, self.inputs = given[0], self.inputs + 1
        if layer.weight.requires_grad and self.x.requires_grad:
            self._await(out)

    def last(self, *_: Any) -> None:
        """Note a call of a row-parallel layer, unless backward recomputes it."""
        self.x = None
        self.outputs += torch._C._current_autograd_node() is None

    def attention(self, part: Any, given: Any, out: Any) -> None:
        """Note a call of an attention with norms of its heads."""
        self.inputs += 1
        for tensor in _tensors(out) if part.forward.trained else ():
            self._await(tensor)

    def _await(self, out: Any) -> None:
        number = self.inputs
        if out.requires_grad:
            out.register_hook(lambda _: self.reached.add(number))


@contextlib.contextmanager
def observe(trained: TrainingRun) -> Iterator[Watch]:
    """Count the sums that a step needs."""
    watch, cut = Watch(), parallel_layers(trained.module)
    handles = [
        *(x.register_forward_hook(watch.first) for x in cut if isinstance(x, ColumnParallel)),
        *(x.register_forward_pre_hook(watch.last) for x in cut if isinstance(x, RowParallel)),
        *(x.register_forward_hook(watch.attention) for x in per_head(trained.module)),
    ]
    try:
        yield watch
    finally:
        watch.x = None
        for handle in handles:
            handle.remove()


def evidence(trained: TrainingRun, watch: Watch | None, *, by_tokens: bool) -> dict[str, Any]:
    """Return facts of the weights held, of the watched step and of a comparison with whole blocks;
    every rank takes part.

    Args:
        watch: record of ``observe``; None if no step was watched.
        by_tokens: each rank is to have a stripe between the halves.

    Raises:
        NotInForce: a fact differs from what the recipe asks for.
    """
    facts = together(trained, lambda: _seen(trained, watch.sums if watch else {}, by_tokens))
    if trained.launch.simulated:  # no rank has the other parts
        demand(trained.observed is not None, "no step was recorded")
        return facts
    alike = together(trained, lambda: _alike(trained))
    return facts | alike | _as_whole_blocks(trained)


def _seen(trained: TrainingRun, sums: Mapping[str, int], by_tokens: bool) -> dict[str, Any]:
    layout = trained.launch.layout
    facts: dict[str, Any] = {"ranks_a_weight": layout.tensor, "data_parallel": layout.data}
    facts |= _held(trained)
    if trained.observed is not None and trained.observed.ran:
        facts |= _attended(trained) | _exchanged(trained, sums, by_tokens)
        facts |= _between(trained) if by_tokens else {}
    return facts


def _held(trained: TrainingRun) -> dict[str, Any]:
    """Check the shapes of the cut layers against the plain model's, and their number."""
    parts, subject = trained.launch.layout.tensor, trained.subject
    with initial.valueless():
        plain = subject.make()
    mine = total = wanted = 0
    for block, whole in zip(trained.blocks(), subject.blocks(plain), strict=True):
        cuts = products(whole)
        for name, cut in cuts.items():
            shape = list(whole.get_submodule(name).weight.shape)
            shape[cut.axis] //= parts
            found = list(block.get_submodule(name).weight.shape)
            demand(found == shape, f"{name} has shape {found}, expected {shape}")
        wanted += len(cuts)
        mine += sum(p.numel() for p in block.parameters())
        total += sum(p.numel() for p in whole.parameters())
    layers = len(parallel_layers(trained.module))
    demand(layers == wanted, f"{layers} layers are sharded, expected {wanted}")
    return {"share_of_a_block": round(mine / total, 4)}


def _attended(trained: TrainingRun) -> dict[str, Any]:
    """Check the heads, queries and keys of torch's attention in the watched step. Attention outside
    of the blocks (refiners of text) has all heads."""
    if "cut_samples" in trained.launch.traits:  # sp's evidence checks them: it cuts them further
        return {}
    parts, calls = trained.launch.layout.tensor, set(trained.subject.survey.attention)
    found = attention_operands(trained)
    if not found:  # attention written out in products: the comparison with whole blocks covers it
        return {}
    cut = {(a.heads // parts, a.queries, a.keys) for a in calls}
    whole = {(a.heads, a.queries, a.keys) for a in calls}
    widest = max(calls, key=lambda a: (a.heads * a.width, a.queries))
    demand(
        (widest.heads // parts, widest.queries, widest.keys) in found <= cut | whole
        and not (cut - found) - {(heads // parts, *rest) for heads, *rest in found & whole},
        f"attention had heads, queries and keys {sorted(found)}, expected {sorted(cut)}",
    )
    return {"heads_inside": widest.heads // parts}


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


def _exchanged(trained: TrainingRun, sums: Mapping[str, int], by_tokens: bool) -> dict[str, Any]:
    """Count the group's collectives in a micro batch. Blocks that backward recomputes repeat those
    of forward."""
    group = group_of(trained.module).group_name
    sent = [s for s in trained.observed.sent if s.group == group]
    micro, blocks = trained.observed.micro_steps, trained.blocks()
    again = "recomputes" in trained.launch.traits
    counts: dict[str, dict[str, float]] = {}
    for phase, kind, wanted in _expected(len(blocks) * micro, sums, by_tokens):
        found = sum(s.phase == phase and s.collective == kind for s in sent)
        # One more gather a phase: behind the last block, or in front of it in backward.
        found -= micro * (kind == GATHER)
        more = again and phase == "backward" and found > wanted
        demand(
            found == wanted or more, f"{found} calls of {kind} in {phase}, expected {wanted} in all"
        )
        name = {GATHER: "gathers_a_block", SUM: "sums_a_block"}.get(kind, "scatters_a_block")
        counts.setdefault(name, {})[phase] = round(found / (len(blocks) * micro), 4)
    size = sum(s.bytes for s in sent if s.phase in BY_TOKENS)
    return {**counts, "exchanged_bytes" if by_tokens else "summed_bytes": size}


def _expected(
    blocks: int, sums: Mapping[str, int], by_tokens: bool
) -> Iterator[tuple[str, str, int]]:
    """Yield (phase, collective, calls); ``blocks`` counts those of all micro-batches."""
    for phase, each in BY_TOKENS.items():
        if by_tokens:
            yield from ((phase, kind, times * blocks) for kind, times in each.items())
        else:
            yield phase, SUM, sums[phase]


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
    away, dtype = 0.0, torch.float32
    for block, args, named, out in map(_of_all_tokens, given):
        with torch.no_grad(), trained.accelerator.autocast(), _whole(block, trained):
            wanted = block(*args, **named)
        if isinstance(block, FSDPModule):  # only a forward of the whole model would reshard it
            block.reshard()
        for mine, whole in zip(_tensors(out), _tensors(wanted), strict=True):
            away, dtype = max(away, relative_error(mine.double(), whole.double())), mine.dtype
    close = close_to(trained, dtype)
    demand(
        away <= close,
        f"a block's output differs from that of an unsharded block by {away:.2g} (relative)",
    )
    return {"away_from_whole_blocks": float(f"{away:.2g}")}


def _tensors(out: Any) -> list[Any]:
    """Return the outputs of a block: a library's may have several, and None among them."""
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]


def _of_all_tokens(call: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Gather input and output of a block that was given a stripe of the tokens."""
    block, args, named, out = call
    if has_stripe(block):
        group = parallel_layers(block)[0].group
        args, out = (all_tokens(args[0], group), *args[1:]), all_tokens(out, group)
    return block, args, named, out


def _keep(given: list[Any]) -> Any:
    return lambda block, args, named, out: given.append((block, args, named, out))


@contextlib.contextmanager
def _whole(block: Any, trained: TrainingRun) -> Iterator[None]:
    """Give the block plain layers with whole weights within the context."""
    cut = {n: layer for n, layer in block.named_modules() if isinstance(layer, ParallelLinear)}
    parts = next(iter(cut.values())).weight.share.parts
    for name, layer in cut.items():
        block.set_submodule(name, _plain(layer, trained))
    scale_sizes(block, lambda size: size * parts)
    try:
        yield
    finally:
        scale_sizes(block, lambda size: size // parts)
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
