"""checkpoint: activation checkpointing, which recomputes activations in backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.activations.block_parts import (
    Recompute,
    Split,
    block_runs,
    keep_products,
    prefixes,
    segments,
)
from strategies.activations.runners import run_singly, runner_of, surround
from strategies.base import Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.strategy import Strategy
from strategies.subject import LAYERS, Subject

# ---- evidence of recomputation ----


RNG_BYTES = 5056
"""Bytes of the CPU generator's state, which compiled checkpoints keep for each attention
(dropout)."""


def recomputed(
    trained: TrainingRun,
    runner: Any,
    depth: int,
    split: Split,
    count: int | None,
    *,
    products: bool = False,
) -> dict[str, Any]:
    """Return the facts of a run in which ``runner`` recomputed ``depth`` blocks by ``split``.

    ``count``: the number of blocks, if not all are. ``products``: outputs of matrix products
    were kept.
    """
    demand(runner is not None, "no block is recomputed in parts")
    demand(runner.blocks == depth, f"{runner.blocks} of {depth} blocks are recomputed in parts")
    counts = [runner.recomputed(call.blocks) for call in runner.calls]
    demand(
        count is None or sum(counts) == count,
        f"{sum(counts)} of {depth} blocks are recomputed, expected {count}",
    )
    parts_of_call = [len(split(number, 0)[0]) if number else 0 for number in counts]
    parts, ran = sum(parts_of_call), runner.parts_run / trained.micro_steps
    demand(ran == parts, f"{ran} parts ran in each micro-batch, expected {parts}")
    wider = 1 + ("doubles_tokens" in trained.launch.traits)
    inputs = sum(n * call.input_bytes for n, call in zip(parts_of_call, runner.calls, strict=True))
    most = inputs * wider + RNG_BYTES * depth
    demand(
        0 < runner.kept_bytes <= most,
        f"{runner.kept_bytes} bytes are kept for backward, expected at most {most}: the inputs of "
        f"{parts} parts",
    )
    facts = {"parts": parts, "kept_bytes": runner.kept_bytes}
    if "compiled" in trained.launch.traits:
        return facts  # blocks are not counted inside a graph: kept bytes show the effect
    forwards = runner.blocks_run / trained.micro_steps
    kept_whole = sum(call.count for call in runner.calls) - sum(counts)
    unreached = runner.unreached / trained.micro_steps
    wanted = kept_whole + sum(block_runs(split, number) for number in counts if number) - unreached
    demand(
        forwards == wanted,
        f"{forwards:.2f} blocks ran forward in each micro-batch, expected {wanted}",
    )
    if products:
        kept, size = runner.products["kept"], runner.products["bytes"]
        least = trained.subject.survey.products * sum(counts) // depth
        text = f"{kept} matrix products are kept, expected {least} and those of attention"
        demand(kept >= least, text)
        # torch reports the bytes since 2.12.
        facts |= {"kept_products": kept} | ({"kept_product_bytes": size} if size else {})
    if count is not None:
        facts["blocks_recomputed"] = sum(counts)
    if unreached:
        facts["blocks_before_gradients"] = unreached
    return {**facts, "block_forwards": forwards / depth}


# ---- parts of a block ----

RUNNER = "run_parts_of_blocks"
"""Attribute of a model that runs these modules."""


def parts_of(blocks: list[Any], part: str) -> list[Any]:
    """Return the children of ``blocks`` that compute ``part``, in order."""
    children = [pair for block in blocks for pair in _inner(block).named_children()]
    return [child for name, child in children if LAYERS[part].fullmatch(name)]


def _inner(block: Any) -> Any:
    """Return the block in a wrapper that has nothing else, as HiDream's blocks have one."""
    children = dict(block.named_children())
    return children["block"] if [*children] == ["block"] else block


def _has_part(subject: Subject, part: str) -> bool:
    """Return whether the blocks of a model have ``part``.

    It builds the model only if the subject does not say so.
    """
    if "layers" in subject.parts:
        return True
    names = {name for linear in subject.linears for name in linear.split(".")}
    if any(map(LAYERS[part].fullmatch, names)):
        return True
    import torch

    with torch.device("meta"):
        return bool(parts_of(subject.blocks(subject.make()), part))


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Strategy):
    """Activation checkpointing: backward recomputes blocks.

    It keeps the input of every k-th block and recomputes the k blocks after it in backward.

    ``every=1`` keeps each block's input. ``every=sqrt`` takes k near the root of the depth: the
    memory of O(sqrt L) activations for one more forward.

    ``keep=nothing`` keeps the first input alone, for O(L^2) work. ``keep=products`` also keeps the
    outputs of matrix products and attention, so that only cheap operations are repeated.

    ``share`` recomputes only that share of the blocks, the first ones (at least one): no more extra
    work than the memory requires. ``spread=on`` takes them evenly over the depth, as trainers with
    an interval do (``share=0.5``: every second one); the last kept blocks then cost more memory.

    ``part=ffn`` and ``part=attention`` recompute only these layers of each block, and keep the
    rest: less is saved, and less is repeated.
    """

    name: ClassVar[str] = "checkpoint"
    slot: ClassVar[Slot] = Slot.RECOMPUTE
    source: ClassVar[str] = (
        "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv:1604.06174); "
        "torch.utils.checkpoint, selective checkpointing"
    )

    every: int | str = 1
    keep: str = "segments"
    share: float = 1.0
    spread: str = "off"
    part: str = "block"

    def __post_init__(self) -> None:
        if self.part not in ("block", *LAYERS):
            raise ValueError(f"part is {self.part!r}; one of block, {', '.join(LAYERS)}")
        whole = (self.every, self.keep, self.share) == (1, "segments", 1)
        if self.part != "block" and not whole:
            raise ValueError(f"part={self.part} keeps the rest of each block; leave all else out")
        if self.every != "sqrt" and not (isinstance(self.every, int) and self.every >= 1):
            raise ValueError(f"every is {self.every!r}; a number of blocks from 1, or sqrt")
        if self.keep not in ("segments", "nothing", "products"):
            raise ValueError(f"keep is {self.keep!r}; one of segments, nothing, products")
        if self.keep == "nothing" and self.every != 1:
            raise ValueError(f"keep=nothing splits by itself; leave every={self.every} out")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share:g}; above 0, to 1 (all blocks)")
        if self.spread not in ("on", "off"):
            raise ValueError(f"spread is {self.spread!r}; on or off")
        if self.spread == "on" and (self.share == 1 or self.every != 1):
            raise ValueError(
                "spread=on is of a share of single blocks; add share=0.5, without every"
            )
        if self.share < 1 and (self.keep == "nothing" or self.every == "sqrt"):
            how = "every=sqrt" if self.every == "sqrt" else f"keep={self.keep}"
            raise ValueError(f"{how} is of all blocks; leave share={self.share:g} out")

    def traits(self) -> frozenset[str]:
        layers = {"recomputes_layers"} if self.part != "block" else ()
        return frozenset({"recomputes", *layers})

    def refuses(self, launch: RunContext) -> str | None:
        subject = launch.subject
        if self.every != 1 or self.keep == "nothing":
            grouped = f"every={self.every}" if self.every != 1 else f"keep={self.keep}"
            if lack := subject.lacks("chain", f"leave {grouped} out"):
                return lack
        if self.part != "block" and not _has_part(subject, self.part):
            return (
                f"no block of {subject.name} has a layer whose name says that it is its "
                f"{self.part}; leave part={self.part} out"
            )
        if isinstance(self.every, int) and self.every > 1:
            depth = subject.dimensions.depth
            if self.every > depth:
                return f"every={self.every}, and the model has {depth} blocks; give at most {depth}"
        return super().refuses(launch)

    def by_block(self, depth: int) -> list[tuple[int, int]]:
        """Return the size of each block's part and its index in it; (0, 0) if it is not
        recomputed."""
        chosen = self._chosen(depth)
        if self.spread == "on":
            return [(1, 0) if index in chosen else (0, 0) for index in range(depth)]
        count = len(chosen)
        sizes, _ = self._split(depth)(count, 0)
        parts = [(size, place) for size in sizes for place in range(size)]
        return [*parts, *[(0, 0)] * (depth - count)]

    def edit_model(self, module: Any, subject: Subject) -> None:
        policy = keep_products if self.keep == "products" else None
        blocks = subject.blocks(module)
        if self.part != "block":
            run_singly(module, parts_of(blocks, self.part), RUNNER)
            inner = getattr(module, RUNNER)
            setattr(module, RUNNER, Recompute(inner, segments(1), random=subject.random_blocks))
            return
        split, indices = self._split(len(blocks)), self._chosen(len(blocks))
        chosen = None if self.share == 1 else [blocks[index] for index in indices]
        more: dict[str, Any] = {"random": subject.random_blocks, "chosen": chosen}
        surround(module, subject, lambda inner: Recompute(inner, split, policy, **more))

    def _chosen(self, depth: int) -> range | list[int]:
        """Return the indices of the recomputed blocks."""
        if self.spread == "off":
            return range(max(1, round(self.share * depth)))
        count = max(1, math.ceil(self.share * depth - 1e-6))
        return [int(number / self.share + 1e-6) for number in range(count)]

    def _split(self, depth: int) -> Split:
        if self.keep == "nothing":
            return prefixes
        return segments(round(math.sqrt(depth)) if self.every == "sqrt" else int(self.every))

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        if self.part != "block":
            return self._of_layers(trained)
        runner, blocks = runner_of(trained.module, Recompute), trained.blocks()
        chosen = [*self._chosen(depth := len(blocks))]
        if runner is not None and self.spread == "on":
            found = [index for index in range(depth) if runner.recomputed([blocks[index]])]
            demand(found == chosen, f"blocks {found} are recomputed, expected {chosen}")
        return recomputed(
            trained,
            runner,
            depth,
            self._split(depth),
            None if self.share == 1 else len(chosen),
            products=self.keep == "products",
        )

    def _of_layers(self, trained: TrainingRun) -> dict[str, Any]:
        layers = parts_of(trained.blocks(), self.part)
        runner = getattr(trained.module, RUNNER, None)
        wanted = {*map(id, layers)}
        ran = {id(call.block) for call in runner.calls} if runner else set()
        demand(
            ran == wanted,
            f"{len(ran & wanted)} of {len(wanted)} layers of the blocks are recomputed, and "
            f"{len(ran - wanted)} others",
        )
        if not layers:  # a pipeline stage whose blocks have none
            return {"parts": 0}
        return recomputed(trained, runner, len(layers), segments(1), None)
