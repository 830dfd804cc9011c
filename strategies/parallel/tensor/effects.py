"""Evidence of tensor parallelism: placements of the cut weights, and sums of a watched step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import Shard

from strategies.base import demand
from strategies.engines.fsdp.shard import local
from strategies.evidence.rules import together
from strategies.parallel.tensor.parallelize import AXIS, Cuts, head_norms, plan

if TYPE_CHECKING:
    from strategies.engine import TrainingRun

SUM = "all_reduce"
"""torch's name of the collective by which DTensors are summed."""
PHASES = ("forward", "backward")


def evidence(run: TrainingRun) -> dict[str, Any]:
    """Return facts of the weights and of the watched step; every rank takes part.

    Raises:
        NotInForce: a fact differs from what the recipe asks for.
    """
    return together(run, _placed, _summed)


def _plans(run: TrainingRun) -> list[tuple[Any, Cuts]]:
    """Return each block with its layers that are cut."""
    blocks = run.blocks()
    return [*zip(blocks, plan(run.module, blocks), strict=True)]


def _placed(run: TrainingRun) -> dict[str, Any]:
    """Check each cut weight's placement, and the elements that this rank stores of all."""
    layout, held, total = run.launch.layout, 0, 0
    for block, cuts in _plans(run):
        for name, cut in cuts.items():
            weight = block.get_submodule(name).weight
            placed = tuple(getattr(weight, "placements", ()))
            wanted = len(placed) == 2 and placed[-1] == Shard(cut.axis)
            demand(wanted, f"{name} is placed as {placed}, expected rows of Shard({cut.axis})")
            size = weight.device_mesh.size(1)
            demand(size == layout.tensor, f"{name} is cut among {size} ranks, not {layout.tensor}")
            held, total = held + local(weight).numel(), total + weight.numel()
    share = total / (layout.tensor * layout.sharers)
    # Rows are dealt with a remainder.
    demand(0 < held <= 1.1 * share, f"{held} elements of cut weights, expected {share:.0f}")
    return {"cut_elements": held}


def _summed(run: TrainingRun) -> dict[str, Any]:
    """Count the sums among ranks that share weights: at least one in forward for each last layer,
    which a block may call for image and text, and in backward one for its first layers' inputs and
    one a step for the gradient of each norm of a head. Layers that do not train feed nothing."""
    if not run.observed.ran:
        return {}
    plans = _plans(run)
    group = run.accelerator.torch_device_mesh[AXIS].get_group().group_name
    sent = [s.phase for s in run.observed.sent if s.collective == SUM and s.group == group]
    found, micro = {phase: sent.count(phase) for phase in PHASES}, run.observed.micro_steps
    used = norms = 0
    for block, cuts in plans:
        last = (block.get_submodule(name) for name, cut in cuts.items() if cut.axis == 1)
        used += micro * sum(layer.weight.requires_grad for layer in last)
        of_heads = map(block.get_submodule, head_norms(block, cuts))
        norms += sum(norm.weight.requires_grad for norm in of_heads)
    for phase, least in zip(PHASES, (used, used + norms), strict=True):
        demand(found[phase] >= least, f"{found[phase]} sums in {phase}, expected {least} or more")
    return {"sums_a_block": {phase: n / (micro * len(plans)) for phase, n in found.items()}}
