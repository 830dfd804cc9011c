"""Runs one pipeline stage on tensors without storage, for a prediction.

Received tensors have no values, so the stage's steps and torch's schedule run unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import InferenceMode

from strategies.engines.fsdp.trace import Unstored
from strategies.engines.replicas_trace import Reducerless
from strategies.inventory import AllocationRecorder

if TYPE_CHECKING:
    from strategies.engine import RunContext


class OneStage(Reducerless):
    """The stage of ``rank``."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def stand_ins(self, books: AllocationRecorder) -> list[contextlib.AbstractContextManager[Any]]:
        return [
            # Stages vote by sends whether all know the shapes that pass: they do.
            mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", agreed),
            mock.patch.object(schedules, "_batch_p2p", _keeping(schedules._batch_p2p)),
            # meta has no generator, and nothing is drawn.
            mock.patch.object(torch.random, "fork_rng", lambda *_, **__: contextlib.nullcontext()),
        ]


class OneShard(OneStage):
    """One rank of a sharded stage: FSDP2 shards, gathers and frees as in a run."""

    def __init__(self, engine: Any, rank: int) -> None:
        super().__init__(rank)
        self.rows = Unstored(engine)

    def beside(self, launch: RunContext) -> frozenset[str]:
        """Return the phases whose gathers overlap with a block's work. Gradients are reduced after
        it; backward counts if blocks are gathered again there, which is the larger part."""
        waited = frozenset() if self.rows.engine.reshard else frozenset({"backward"})
        return self.rows.beside(launch) - waited

    def begin(self, launch: RunContext, device: str) -> None:
        self.rows.begin(launch, device)

    def stand_ins(self, books: AllocationRecorder) -> list[contextlib.AbstractContextManager[Any]]:
        return [*super().stand_ins(books), *self.rows.stand_ins(books)]


class HeldWork(NamedTuple):
    """A send or a receive that holds its tensor as gloo's does; the fake group's holds nothing."""

    work: list[Any]
    tensor: torch.Tensor

    def wait(self) -> None:
        """Return at once."""


def _keeping(batch: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def run(operations: list[Any], desc: str | None = None) -> list[Any]:
        # One at a time: a batch needs a backend, which tensors without storage lack.
        return [HeldWork(batch([op], desc), op.tensor) for op in operations]

    return run


def agreed(self: Any, stages: Any, *given: Any, **named: Any) -> None:
    """Set the vote's outcome when every stage knows its inputs and outputs."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
