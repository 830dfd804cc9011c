"""block_swap: blocks whose weights live in host memory, and are on the device only for their own
work."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from strategies.base import Attachment, Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.strategy import Strategy
from strategies.subject import Subject
from strategies.workloads import BOTH

AT_ONCE = 2
"""Streamed blocks on the device at a time: the current one, and the next."""


def spread(count: int, depth: int) -> list[int]:
    """Return ``count`` of ``depth`` block indices, evenly spaced to leave time for a copy between
    two."""
    return [(2 * i + 1) * depth // (2 * count) for i in range(count)]


def streamable(block: Any, module: Any, subject: Subject) -> list[tuple[Any, str, Any]]:
    """Return owner, name and parameter of a block's weights that can be streamed.

    Modules that code outside of their block calls are left out, with those within: an adapter has
    the layer that it replaces within.
    """
    stay = {part for name in subject.lent for part in module.get_submodule(name).modules()}
    owners = [owner for owner in block.modules() if owner not in stay]
    found = [(owner, *pair) for owner in owners for pair in owner._parameters.items()]
    return [one for one in found if one[2] is not None]


@dataclass(frozen=True, kw_only=True)
class BlockSwap(Strategy):
    """Keeps blocks' weights in host memory between uses.

    ``blocks`` is the number of blocks, which are taken evenly over the depth. Each is copied to the
    device for its forward and its backward. Two are there at a time: one computes while the next
    arrives. Frozen weights are copied in and dropped. If all weights train, gradients go to host
    memory, where the optimizer steps them. With ``optimizer_in_backward`` it steps them on the
    device instead, and its state stays there. Layers of a block that other code calls too, such as
    the model's output, stay on the device.
    """

    name: ClassVar[str] = "block_swap"
    slot: ClassVar[Slot] = Slot.SWAP
    source: ClassVar[str] = (
        "Rajbhandari et al. 2021, ZeRO-Infinity (arXiv:2104.07857), section 5.1; "
        "kohya-ss/sd-scripts and musubi-tuner, --blocks_to_swap"
    )
    workloads: ClassVar[tuple[str, ...]] = BOTH
    ranges: ClassVar[dict[str, Any]] = {
        "blocks": (
            lambda v: isinstance(v, int) and v > AT_ONCE,
            f"a whole number from {AT_ONCE + 1}: {AT_ONCE} of them are on the device at a time",
        )
    }

    blocks: int = 4

    def traits(self) -> frozenset[str]:
        return frozenset({"streams_weights"})

    def refuses(self, launch: RunContext) -> str | None:
        depth = launch.subject.depth
        if self.blocks > depth:
            return f"blocks={self.blocks}, and the model has {depth} blocks; give at most {depth}"
        return super().refuses(launch)

    def by_block(self, depth: int) -> list[int]:
        """Return 1 for a streamed block, 0 for one whose weights stay; more if there are too few
        blocks."""
        return [*map(spread(self.blocks, depth).count, range(depth))]

    def edit_model(self, module: Any, subject: Subject) -> None:
        """Draw the weights of the chosen blocks that have no value yet in host memory."""
        from torch import nn

        from strategies import initial

        def as_it_is(values: Any) -> Any:
            return nn.Parameter(values, requires_grad=values.is_floating_point())

        blocks = self._chosen(module, subject).values()
        for _, _, p in (one for block in blocks for one in streamable(block, module, subject)):
            waits = initial.pending(p)
            if waits is not None and waits.keep is None:
                p.pending = replace(waits, keep=as_it_is)

    def configure(self, accelerator: Any, module: Any, launch: RunContext) -> None:
        """Remove the weights from the model, so that no call moves them to the device; they wait
        as ``swapped`` of their block. Weights that several layers share stay."""
        frozen = "frozen_weights" in launch.traits
        users = Counter(id(p) for m in module.modules() for p in m._parameters.values())
        for block in self._chosen(module, launch.subject).values():
            block.swapped = [
                one
                for one in streamable(block, module, launch.subject)
                if users[id(one[2])] == 1 and not (frozen and one[2].requires_grad)
            ]
            for owner, name, _ in block.swapped:
                owner._parameters[name] = None

    def _chosen(self, module: Any, subject: Subject) -> dict[int, Any]:
        blocks = subject.blocks(module)
        return {index: blocks[index] for index in spread(self.blocks, len(blocks))}

    def attach(self, run: TrainingRun) -> Attachment:
        from strategies.streaming.streamer import Streamer

        chosen = self._chosen(run.module, run.subject)
        taken = {index: block.__dict__.pop("swapped") for index, block in chosen.items()}
        streamer = Streamer(run, taken)
        free = streamer.stepped()
        if free:  # a group of their own: no optimizer operation spans both devices
            run.inner_optimizer.add_param_group({"params": free})
        return streamer

    def observe(self, run: TrainingRun) -> AbstractContextManager[Any]:
        streamer: Any = run.attached.get(self.name)
        return streamer.watched() if streamer else nullcontext()

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        streamer: Any = run.attached.get(self.name)
        demand(streamer is not None, "no block's weights are streamed")
        found = len(streamer.streamed)
        demand(found == self.blocks, f"{found} blocks are streamed, expected {self.blocks}")
        facts: dict[str, Any] = streamer.facts(self.note(run), AT_ONCE)
        return facts
