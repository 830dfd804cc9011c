"""What shows that blocks were recomputed in backward: what was kept of them, and what ran again."""

from __future__ import annotations

from typing import Any

from strategies.activations.parts import Recompute
from strategies.activations.runners import runner_of
from strategies.activations.splits import Split, block_runs
from strategies.base import demand
from strategies.engine import Trained

__all__ = ["recomputed"]

RNG_BYTES = 5056
"""The CPU generator's state, which compiled checkpoints keep for each attention: it might draw."""


def recomputed(
    trained: Trained,
    split: Split,
    count: int | None,
    *,
    products: bool = False,
    reentrant: bool = False,
) -> dict[str, Any]:
    """The facts of a run whose blocks were to be recomputed, split in this way; ``count``: the
    first so many alone, else all. ``products``: with the outputs of matrix products kept;
    ``reentrant``: with no graph recorded in forward."""
    runner, depth = runner_of(trained.module, Recompute), len(trained.blocks())
    demand(runner is not None, "the blocks are not run by parts")
    demand(runner.blocks == depth, f"{runner.blocks} of {depth} blocks are run by parts")
    counts = [runner.recomputed(call.block, call.count) for call in runner.calls]
    demand(
        count is None or sum(counts) == count,
        f"{sum(counts)} of {depth} blocks are recomputed, not {count}",
    )
    parts_of_call = [len(split(number, 0)[0]) if number else 0 for number in counts]
    parts, ran = sum(parts_of_call), runner.parts_run / trained.micro_steps
    demand(ran == parts, f"{ran} parts a micro step, not {parts}")
    wider = 1 + ("doubles_tokens" in trained.launch.traits)
    inputs = sum(n * call.input_bytes for n, call in zip(parts_of_call, runner.calls, strict=True))
    most = inputs * wider + RNG_BYTES * depth
    demand(
        0 < runner.kept_bytes <= most,
        f"{runner.kept_bytes} bytes are kept for backward; {parts} parts' inputs are {most}",
    )
    facts = {"parts": parts, "kept_bytes": runner.kept_bytes}
    if "compiled" in trained.launch.traits:
        return facts  # blocks are not counted inside a graph: what is kept shows the effect
    forwards = runner.blocks_run / trained.micro_steps
    kept_whole = sum(call.count for call in runner.calls) - sum(counts)
    wanted = kept_whole + sum(block_runs(split, number) for number in counts if number)
    demand(
        forwards == wanted,
        f"{forwards:.2f} blocks ran forward a micro step; recomputing takes {wanted}",
    )
    facts |= _graphless(runner, trained.micro_steps, parts if reentrant else 0)
    if products:
        facts |= _kept_products(runner, trained.subject.survey.products * sum(counts) // depth)
    if count is not None:
        facts["blocks_recomputed"] = sum(counts)
    return {**facts, "block_forwards": forwards / depth}


def _graphless(runner: Recompute, micro_steps: int, meant: int) -> dict[str, Any]:
    """How many parts ran forward without a graph."""
    ran = runner.graphless / micro_steps
    demand(ran == meant, f"{ran:.2f} parts a micro step ran forward without a graph, not {meant}")
    return {"graphless_parts": meant} if meant else {}


def _kept_products(runner: Recompute, least: int) -> dict[str, Any]:
    """How many outputs of products were kept, and their bytes where torch shows them."""
    kept, size = runner.products["kept"], runner.products["bytes"]
    demand(kept >= least, f"{kept} products are kept, of {least} and those of attention")
    return {"kept_products": kept} | ({"kept_product_bytes": size} if size else {})
