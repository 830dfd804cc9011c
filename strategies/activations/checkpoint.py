"""checkpoint: activation checkpointing, which recomputes activations in backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.activations.block_parts import NESTED, Recompute, keep_products, part_sizes
from strategies.activations.runners import run_singly, runner_of, surround
from strategies.base import Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.strategy import Strategy
from strategies.subject import LAYERS, Subject

RNG_BYTES = 5056
"""Bytes of the CPU generator's state, which compiled checkpoints keep for each attention
(dropout)."""

# ---- parts of a block ----

RUNNER = "run_parts_of_blocks"
"""Attribute of a model that runs these modules."""


def parts_of(blocks: list[Any], part: str) -> list[Any]:
    """Return the children of ``blocks`` that compute ``part``, in order.

    A wrapper that has nothing but a block, as HiDream's, is looked into.
    """
    inner = [b.block if [n for n, _ in b.named_children()] == ["block"] else b for b in blocks]
    children = [pair for block in inner for pair in block.named_children()]
    return [child for name, child in children if LAYERS[part].fullmatch(name)]


def _has_part(subject: Subject, part: str) -> bool:
    """Return whether a model's blocks have ``part``; it is built only if no name says so."""
    names = {name for linear in subject.linears for name in linear.split(".")}
    if "layers" in subject.parts or any(map(LAYERS[part].fullmatch, names)):
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
    values: ClassVar[dict[str, Any]] = {
        "part": ("block", *LAYERS),
        "keep": ("segments", "nothing", "products"),
        "spread": ("on", "off"),
    }

    every: int | str = 1
    keep: str = "segments"
    share: float = 1.0
    spread: str = "off"
    part: str = "block"

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = (self.every, self.keep, self.share) == (1, "segments", 1)
        if self.part != "block" and not plain:
            raise ValueError(f"part={self.part} keeps the rest of each block; leave all else out")
        if self.every != "sqrt" and not (isinstance(self.every, int) and self.every >= 1):
            raise ValueError(f"every is {self.every!r}; a number of blocks from 1, or sqrt")
        if self.keep == "nothing" and self.every != 1:
            raise ValueError(f"keep=nothing splits by itself; leave every={self.every} out")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share:g}; above 0, to 1 (all blocks)")
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
            depth = subject.depth
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
        sizes = part_sizes(count, self._length(depth))
        parts = [(size, place) for size in sizes for place in range(size)]
        return [*parts, *[(0, 0)] * (depth - count)]

    def edit_model(self, module: Any, subject: Subject) -> None:
        policy = keep_products if self.keep == "products" else None
        blocks = subject.blocks(module)
        if self.part != "block":
            run_singly(module, parts_of(blocks, self.part), RUNNER)
            inner = getattr(module, RUNNER)
            setattr(module, RUNNER, Recompute(inner, 1, random=subject.random_blocks))
            return
        length, indices = self._length(len(blocks)), self._chosen(len(blocks))
        chosen = None if self.share == 1 else [blocks[index] for index in indices]
        more: dict[str, Any] = {"random": subject.random_blocks, "chosen": chosen}
        surround(module, subject, lambda inner: Recompute(inner, length, policy, **more))

    def _chosen(self, depth: int) -> range | list[int]:
        """Return the indices of the recomputed blocks."""
        if self.spread == "off":
            return range(max(1, round(self.share * depth)))
        count = max(1, math.ceil(self.share * depth - 1e-6))
        return [int(number / self.share + 1e-6) for number in range(count)]

    def _length(self, depth: int) -> int:
        """Return the number of blocks of a part."""
        if self.keep == "nothing":
            return NESTED
        return round(math.sqrt(depth)) if self.every == "sqrt" else int(self.every)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        """Return the parts, the bytes kept for backward and the forward runs of each block.

        ``blocks`` are layers of blocks if ``part`` says so.
        """
        runner, blocks = runner_of(run.module, Recompute), run.blocks()
        wanted = [blocks[index] for index in self._chosen(len(blocks))]
        length = self._length(run.subject.depth) if self.part == "block" else 1
        if self.part != "block":
            runner = getattr(run.module, RUNNER, None)
            blocks = wanted = parts_of(blocks, self.part)
            if not blocks:  # a pipeline stage whose blocks have none
                return {"parts": 0}
        demand(runner is not None, "no block is recomputed in parts")
        ran, found = runner.blocks, [*filter(runner.recomputes, runner.blocks)]
        chosen = {*map(id, found)} == {*map(id, wanted)} and {*map(id, ran)} == {*map(id, blocks)}
        text = f"{len(found)} of {len(ran)} blocks are recomputed, expected {len(wanted)}"
        demand(chosen, f"{text} of {len(blocks)}, or others")
        text = f"parts have {runner.length} blocks, expected {length} ({NESTED}: nested)"
        demand(runner.length == length, text)
        return self._counted(run, runner, len(blocks))

    def _counted(self, run: TrainingRun, runner: Any, depth: int) -> Any:
        """Return the facts of a run in which ``runner`` recomputed blocks."""
        numbers = [sum(map(runner.recomputes, blocks)) for blocks, _ in runner.calls]
        parts = [len(part_sizes(n, runner.length)) if n else 0 for n in numbers]
        ran = runner.parts_run / run.micro_steps
        demand(ran == sum(parts), f"{ran} parts ran in each micro-batch, expected {sum(parts)}")
        wider = 1 + ("doubles_tokens" in run.launch.traits)
        inputs = sum(n * size for n, (_, size) in zip(parts, runner.calls, strict=True))
        most = inputs * wider + RNG_BYTES * depth
        text = f"{runner.kept_bytes} bytes are kept for backward, expected at most {most}"
        demand(0 < runner.kept_bytes <= most, f"{text}: the inputs of {sum(parts)} parts")
        facts = {"parts": sum(parts), "kept_bytes": runner.kept_bytes}
        if "compiled" in run.launch.traits:
            return facts  # blocks are not counted inside a graph: kept bytes show the effect
        forwards = runner.blocks_run / run.micro_steps
        demand(forwards > depth, f"{forwards:.2f} of {depth} blocks ran forward: none ran again")
        as_asked = self.keep != "products" or runner.products > 0
        demand(as_asked, "no output of a matrix product is kept")
        return {**facts, "block_forwards": forwards / depth}
