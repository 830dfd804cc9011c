"""A pipeline's stage on tensors without storage: what a prediction puts in the place of the others.

What is received has no values, so that the stage's own steps, and torch's schedule of them, run as
they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import InferenceMode

from strategies.books import Books
from strategies.engines.fsdp.imitation import Unstored
from strategies.engines.replicas_imitation import Reducerless

if TYPE_CHECKING:
    from strategies.engine import Launch

__all__ = ["Lonely", "Sharing"]


class Lonely(Reducerless):
    """One stage, which is that of ``rank``."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def stand_ins(self, books: Books) -> list[contextlib.AbstractContextManager[Any]]:
        return [
            # Stages vote, by numbers that they send, whether all know what passes: they do.
            mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", agreed),
            mock.patch.object(schedules, "_batch_p2p", _keeping(schedules._batch_p2p)),
            # There is no generator on meta, and nothing is drawn.
            mock.patch.object(torch.random, "fork_rng", lambda *_, **__: contextlib.nullcontext()),
        ]


class Sharing(Lonely):
    """One rank of a stage that several share: FSDP2 cuts, gathers and frees as in a run."""

    def __init__(self, engine: Any, rank: int) -> None:
        super().__init__(rank)
        self.rows = Unstored(engine)

    def beside(self, launch: Launch) -> frozenset[str]:
        """Blocks are gathered beside the block at work; gradients are reduced behind all of it,
        but where blocks are gathered again in backward, which is the larger part."""
        waited = frozenset() if self.rows.engine.reshard else frozenset({"backward"})
        return self.rows.beside(launch) - waited

    def begin(self, launch: Launch, device: str) -> None:
        self.rows.begin(launch, device)

    def stand_ins(self, books: Books) -> list[contextlib.AbstractContextManager[Any]]:
        return [*super().stand_ins(books), *self.rows.stand_ins(books)]


class Kept(NamedTuple):
    """A send or a receive that holds its tensor, as gloo's does: the fake group's holds nothing."""

    work: list[Any]
    tensor: torch.Tensor

    def wait(self) -> None:
        """Nothing is on its way."""


def _keeping(batch: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def run(operations: list[Any], desc: str | None = None) -> list[Any]:
        # One at a time: together they ask for a backend, and tensors without storage have none.
        return [Kept(batch([op], desc), op.tensor) for op in operations]

    return run


def agreed(self: Any, stages: Any, *given: Any, **named: Any) -> None:
    """What the vote comes to where every stage was told what it is given and gives."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
