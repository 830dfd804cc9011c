"""block_swap: blocks whose weights live in host memory, and are on the device only for their own
work."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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

    blocks: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, int) or self.blocks <= AT_ONCE:
            raise ValueError(
                f"blocks is {self.blocks!r}; a whole number from {AT_ONCE + 1}: {AT_ONCE} of them "
                "are on the device at a time"
            )

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
        from strategies.streaming.evidence import lent, stay_on_host

        for block in self._chosen(module, subject).values():
            stay_on_host(block, lent(module, subject))

    def configure(self, accelerator: Any, module: Any, launch: RunContext) -> None:
        from strategies.streaming.evidence import lent, take_out

        blocks = self._chosen(module, launch.subject).values()
        stay = lent(module, launch.subject)
        take_out(module, blocks, frozen="frozen_weights" in launch.traits, stay=stay)

    def _chosen(self, module: Any, subject: Subject) -> dict[int, Any]:
        blocks = subject.blocks(module)
        return {index: blocks[index] for index in spread(self.blocks, len(blocks))}

    def attach(self, trained: TrainingRun) -> Attachment:
        from strategies.streaming.streamer import Streamer

        chosen = self._chosen(trained.module, trained.subject)
        taken = {index: block.__dict__.pop("swapped") for index, block in chosen.items()}
        streamer = Streamer(trained, taken)
        free = streamer.stepped()
        if free:  # a group of their own: no optimizer operation spans both devices
            trained.inner_optimizer.add_param_group({"params": free})
        return streamer

    def observe(self, trained: TrainingRun) -> AbstractContextManager[Any]:
        streamer: Any = trained.attached.get(self.name)
        return streamer.watched() if streamer else nullcontext()

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        from strategies.streaming.evidence import streamed_facts

        streamer: Any = trained.attached.get(self.name)
        demand(streamer is not None, "no block's weights are streamed")
        found = len(streamer.streamed)
        demand(found == self.blocks, f"{found} blocks are streamed, expected {self.blocks}")
        return streamed_facts(trained, streamer, self.note(trained), AT_ONCE)
