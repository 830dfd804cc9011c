"""Adapter of the pipeline for predictions: trace one stage on tensors without storage.
Received tensors have no values, so the stage's steps and torch's schedule run unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from harness.planner.adapters.base import AllocationRecorder
from harness.planner.adapters.ddp import DdpAdapter
from strategies.engines.pipeline.schedules import bubble_fraction, dealt

if TYPE_CHECKING:
    import torch

    from strategies.engine import RunContext


ALL_STAGES = 4
"""Largest number of stages of which each is predicted."""


class PipelineAdapter(DdpAdapter):
    """Adapter that runs the stage of ``rank``."""

    def by_block(self, depth: int) -> Sequence[Hashable]:
        """Return the stage of each block."""
        engine = self.engine
        runs = dealt(depth, engine.stages * engine.stage_runs)
        return [n % engine.stages for n, (first, end) in enumerate(runs) for _ in range(first, end)]

    def distinct_ranks(self, launch: RunContext) -> Sequence[int]:
        """Return the first rank of each stage. Of many stages, only the ends and the second: later
        ones have as many blocks or fewer, and keep as many micro-batches or fewer."""
        count, data = self.engine.stages, self.engine.layout(launch.processes).data
        stages = range(count) if count <= ALL_STAGES else (0, 1, count - 1)
        return [stage * data for stage in stages]

    @property
    def bubble_fraction(self) -> Fraction:
        return bubble_fraction(self.engine.stages, self.engine.stage_runs, self.engine.micro)

    def patches(
        self, launch: RunContext, recorder: AllocationRecorder
    ) -> list[contextlib.AbstractContextManager[Any]]:
        import torch
        from torch.distributed.pipelining import schedules

        batch = schedules._batch_p2p

        def keeping(operations: list[Any], desc: str | None = None) -> list[Any]:
            # One at a time: a batch needs a backend, which tensors without storage lack.
            return [HeldWork(batch([op], desc), op.tensor) for op in operations]

        return [
            # Stages vote by sends whether all know the shapes that pass: they do.
            mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", agreed),
            mock.patch.object(schedules, "_batch_p2p", keeping),
            # meta has no generator, and nothing is drawn.
            mock.patch.object(torch.random, "fork_rng", lambda *_, **__: contextlib.nullcontext()),
        ]


class HeldWork(NamedTuple):
    """A send or a receive that holds its tensor as gloo's does; the fake group's holds nothing."""

    work: list[Any]
    tensor: torch.Tensor

    def wait(self) -> None:
        """Return at once."""


def agreed(self: Any, stages: Any, *given: Any, **named: Any) -> None:
    """Set the vote's outcome when every stage knows its inputs and outputs."""
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
