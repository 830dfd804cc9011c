"""Adapters of the pipelines for predictions: trace one stage on tensors without storage.

Received tensors have no values, so the stage's steps and torch's schedule run unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from harness.planner.adapters.base import AllocationRecorder
from harness.planner.adapters.ddp import DdpAdapter
from harness.planner.adapters.fsdp import FsdpAdapter
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
        homes = self.engine.homes
        runs = zip(homes, dealt(depth, len(homes)), strict=True)
        return [stage for stage, (first, behind) in runs for _ in range(first, behind)]

    def distinct_ranks(self, launch: RunContext) -> Sequence[int]:
        """Return the first rank of each stage. Of many stages, only the first of each kind: later
        ones keep activations of as many micro-batches or fewer."""
        data = self.engine.layout(launch.processes).data
        return [stage * data for stage in self._distinct_stages(launch.subject)]

    def _distinct_stages(self, subject: Any) -> Sequence[int]:
        homes, known = self.engine.homes, sum(subject.depths.values())
        stages = range(self.engine.stages)
        if len(stages) <= ALL_STAGES or known != subject.dimensions.depth:
            return stages
        kinds = [kind for kind, count in enumerate(subject.depths.values()) for _ in range(count)]
        runs = dealt(known, len(homes))
        first = dict[Any, int]()
        for stage in stages:
            own = [kinds[slice(*runs[n])] for n, home in enumerate(homes) if home == stage]
            ends = (homes[0] == stage, homes[-1] == stage)
            first.setdefault((str(own), ends), stage)
        return [*first.values()]

    @property
    def bubble_fraction(self) -> Fraction:
        engine = self.engine
        return bubble_fraction(engine.schedule, engine.stages, engine.stage_runs, engine.micro)

    def prepare_trace(self, launch: RunContext) -> None:
        """Find the tensors that pass between the stages, once for all of them."""
        from strategies.engines.pipeline import cut

        if launch.subject.lacks("ends"):
            cut.passage_between(launch.subject)

    def patches(
        self, launch: RunContext, recorder: AllocationRecorder
    ) -> list[contextlib.AbstractContextManager[Any]]:
        import torch
        from torch.distributed.pipelining import schedules

        return [
            # Stages vote by sends whether all know the shapes that pass: they do.
            mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", agreed),
            mock.patch.object(schedules, "_batch_p2p", _keeping(schedules._batch_p2p)),
            # meta has no generator, and nothing is drawn.
            mock.patch.object(torch.random, "fork_rng", lambda *_, **__: contextlib.nullcontext()),
        ]


class ShardedAdapter(PipelineAdapter):
    """Adapter that runs one rank of a sharded stage: FSDP2 shards, gathers and frees as in a
    run."""

    def overlapped_phases(self, launch: RunContext) -> frozenset[str]:
        """Return the phases whose gathers overlap with a block's work. Gradients are reduced after
        it; backward counts if blocks are gathered again there, which is the larger part."""
        waited = frozenset() if self.engine.reshard else frozenset({"backward"})
        return FsdpAdapter(self.engine).overlapped_phases(launch) - waited

    def patches(
        self, launch: RunContext, recorder: AllocationRecorder
    ) -> list[contextlib.AbstractContextManager[Any]]:
        rows = FsdpAdapter(self.engine).patches(launch, recorder)
        return [*super().patches(launch, recorder), *rows]


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
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
