"""Evidence of tensor parallelism: placements of the cut weights, sums of a watched step, and heads
inside attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import Shard

from strategies.base import demand
from strategies.engines.fsdp.shard import local
from strategies.evidence.rules import together
from strategies.parallel.sequence.effects import attention_operands
from strategies.parallel.tensor.parallelize import AXIS
from strategies.parallel.tensor.products import head_norms, products

if TYPE_CHECKING:
    from strategies.engine import TrainingRun

SUM = "all_reduce"
"""torch's name of the collective by which DTensors are summed."""


def evidence(trained: TrainingRun) -> dict[str, Any]:
    """Return facts of the weights and of the watched step; every rank takes part.

    Raises:
        NotInForce: a fact differs from what the recipe asks for.
    """
    looks = [_placed]
    if trained.observed is not None and trained.observed.ran:
        looks += [_summed, _attended]
    return together(trained, *((lambda look=look: look(trained)) for look in looks))


def _cut(trained: TrainingRun) -> list[tuple[str, int, Any]]:
    """Return (name, axis, weight) of each layer that is to be cut."""
    return [
        (name, cut.axis, block.get_submodule(name).weight)
        for block in trained.blocks()
        for name, cut in products(block).items()
    ]


def _placed(trained: TrainingRun) -> dict[str, Any]:
    """Check each cut weight's placement and the elements that this rank stores of it."""
    layout, held, total = trained.launch.layout, 0, 0
    for name, axis, weight in _cut(trained):
        placed = tuple(getattr(weight, "placements", ()))
        wanted = len(placed) == 2 and placed[-1] == Shard(axis)
        demand(wanted, f"{name} is placed as {placed}, expected rows of its part, Shard({axis})")
        size = weight.device_mesh.size(1)
        demand(size == layout.tensor, f"{name} is cut among {size} ranks, not {layout.tensor}")
        held, total = held + local(weight).numel(), total + weight.numel()
    demand(total > 0, "no layer of the blocks is cut")
    share = total / (layout.tensor * layout.sharers)
    # Rows are dealt with a remainder.
    demand(0 < held <= 1.1 * share, f"{held} elements of cut weights, expected {share:.0f}")
    return {"cut_layers": len(_cut(trained)), "cut_elements": held}


def _summed(trained: TrainingRun) -> dict[str, Any]:
    """Count the sums among ranks that share weights: at least one in forward for each last layer,
    which a block may call for image and text, and in backward one for its first layers' inputs and
    one for each norm of a head."""
    group = trained.accelerator.torch_device_mesh[AXIS].get_group().group_name
    sent = [s.phase for s in trained.observed.sent if s.collective == SUM and s.group == group]
    last = [weight for _, axis, weight in _cut(trained) if axis == 1]
    micro = trained.observed.micro_steps
    used = micro * sum(weight.requires_grad for weight in last)  # others feed nothing
    forward, backward = sent.count("forward"), sent.count("backward")
    text = f"{forward} sums in forward and {backward} in backward"
    demand(forward >= used, f"{text}, expected {used} or more in forward")
    wanted = used + _head_norms(trained)
    demand(backward >= wanted, f"{text}, expected {wanted} or more in backward")
    blocks = micro * len(trained.blocks())
    return {"sums_a_block": {"forward": forward / blocks, "backward": backward / blocks}}


def _head_norms(trained: TrainingRun) -> int:
    """Return the number of trained norms of a head: each one's gradient is summed once a step."""
    pairs = ((block, name) for block in trained.blocks() for name in head_norms(block))
    return sum(block.get_submodule(name).weight.requires_grad for block, name in pairs)


def _attended(trained: TrainingRun) -> dict[str, Any]:
    """Check the heads of torch's attention; attention outside of the blocks keeps all of its."""
    found = {heads for heads, *_ in attention_operands(trained)}
    layout = trained.launch.layout
    parts = layout.tensor * layout.sequence
    if not found or "cut_samples" in trained.launch.traits:  # written out, or shown by sp
        return {}
    whole = {call.heads for call in trained.subject.survey.attention}
    wanted = {heads // parts for heads in whole}
    text = f"attention had {sorted(found)} heads, expected {sorted(wanted)}"
    demand(bool(found & wanted) and found <= wanted | whole, text)
    return {"heads_inside": min(found)}
