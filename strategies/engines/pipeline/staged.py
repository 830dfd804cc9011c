"""The model of one stage as a training step calls it, and a step run by torch's schedule.

A schedule runs forward and backward of all micro batches by itself. So that there is one loss and
one way to a prediction for all engines, every stage asks for the loss of a micro batch as any
engine does; where the model is called on the way there, it runs the blocks of one of its runs on
what it received, and leaves with what it hands on (``Handed``), but for the last run, from which
prediction and loss go their usual way (``ways``). torch has a stage of its own for each run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from strategies.engines.pipeline.cut import Cut
from strategies.engines.pipeline.orders import BACKWARD, FORWARD, WEIGHTS, Part
from strategies.engines.pipeline.places import Places
from strategies.engines.pipeline.schedules import Schedule
from strategies.engines.pipeline.ways import Borders, Handed, way
from strategies.subject import Subject

__all__ = ["Pipe", "Stage", "Staged"]


class Staged(nn.Module):
    """A cut model, called as the whole one is. ``run``: the run of blocks that is asked for, on
    what it ``received`` from the one before; None outside a step, when a prediction goes through
    all stages at once and every rank has it."""

    def __init__(self, module: nn.Module, cut: Cut, places: Places) -> None:
        super().__init__()
        self.module, self.cut, self.places = module, cut, places
        self.way = way(module, cut)
        self.run: int | None = None
        self.received: tuple[Tensor, ...] = ()
        self.pipe: Pipe | None = None

    def forward(self, *given: Any, **named: Any) -> Any:
        """What the whole model returns, behind the last run.

        Raises:
            Handed: behind the others, within a step.
        """
        if self.run is None:
            return self._through(*given, **named)
        return self._own(self.run, self.received, (), given, named)

    def _own(self, run: int, *given: Any) -> Any:
        return self.way.own(run, *given)

    def _through(self, *given: Any, **named: Any) -> Any:
        """From run to run, each while the other stages wait; no gradient can go back."""
        found: list[Any] = [(), ()]
        for run, home in enumerate(self.cut.homes):
            if home == self.cut.index:
                try:
                    found = [self._own(run, *found, given, named), ()]
                except Handed as left:
                    found = [left.tensors, left.outputs]
            dist.broadcast_object_list(found, src=self.places.rank(home), group=self.places.pipe)
        return found[0]


class Chunk(nn.Module):
    """What torch's stage of one ``run`` runs: the way to the loss of micro batch ``number``."""

    def __init__(self, staged: Staged, run: int, passes: Sequence[Tensor]) -> None:
        super().__init__()
        # torch looks for weights here: the model of all runs is hidden.
        object.__setattr__(self, "staged", staged)
        self.own = nn.ModuleList(staged.cut.parts(staged.module, run))
        self.shared = nn.ParameterList(staged.cut.common(staged.module))
        self.run, self.passes = run, passes
        self.loss_of: Callable[[int], Tensor] | None = None
        self.number = 0

    def forward(self, *received: Tensor) -> Any:
        self.staged.run, self.staged.received = self.run, received
        try:
            return self.loss_of(self.number).reshape(1)
        except Handed as left:
            # Autocast may leave another type than the one that the next stage made room for.
            return tuple(t.to(p.dtype) for t, p in zip(left.tensors, self.passes, strict=True))
        finally:
            self.staged.run, self.staged.received = None, ()


class Stage(PipelineStage):
    """torch's stage, which says what it runs: ``tell`` is called before each ``Part``, and with
    None when it is over. ``worked``: seconds that these took."""

    tell: Callable[[Part | None], None] = staticmethod(lambda part: None)
    worked = 0.0

    def forward_one_chunk(self, number: int, *given: Any, **named: Any) -> Any:
        """See torch's."""
        self.submod.number = number
        with self._working(FORWARD, number):
            return super().forward_one_chunk(number, *given, **named)

    def backward_one_chunk(self, number: int, *given: Any, **named: Any) -> None:
        """See torch's."""
        with self._working(BACKWARD, number):
            super().backward_one_chunk(number, *given, **named)

    def backward_weight_one_chunk(self, number: int, *given: Any, **named: Any) -> None:
        """See torch's."""
        with self._working(WEIGHTS, number):
            super().backward_weight_one_chunk(number, *given, **named)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """See torch's; what all stages have is divided once, where it is added up."""
        for p in self.submod.own.parameters():
            if p.grad is not None:
                p.grad.div_(grad_scale_factor)

    @contextlib.contextmanager
    def _working(self, what: str, number: int) -> Iterator[None]:
        self.tell(Part(what, self.stage_index, number))
        began = time.perf_counter()
        yield
        self.worked += time.perf_counter() - began
        self.tell(None)


class Pipe:
    """This rank's stages of torch's, one a run of blocks, and their schedule: made when the first
    micro batch says what passes."""

    def __init__(
        self, staged: Staged, schedule: Schedule, micro: int, kind: type[Stage] = Stage
    ) -> None:
        self.staged, self.micro, self.kind = staged, micro, kind
        self.order = schedule
        self.stages: list[Stage] = []
        self.borders: Borders = []
        self.schedule: Any = None
        self.tell: Callable[[Part | None], None] = Stage.tell
        self.seconds: list[tuple[float, float]] = []
        """Of each step: how long this rank worked, and until it had worked for the last time."""

    def step(self, batches: Sequence[Any], loss_of: Callable[[Any], Tensor]) -> Tensor:
        """Forward and backward of all micro batches; their losses, on every rank [micro]."""
        began = time.perf_counter()
        losses: list[Tensor] = []
        last = self.staged.cut.last
        target = torch.zeros(self.micro) if last else None
        with self._asking(lambda number: loss_of(batches[number])):
            self.schedule.step(target=target, losses=losses, return_outputs=False)
        worked = sum(stage.worked for stage in self.stages)
        self.seconds.append((worked, time.perf_counter() - began))
        found = torch.stack([x.detach() for x in losses]) if last else None
        return self._told(found, batches[0].t.device)

    @contextlib.contextmanager
    def _asking(self, loss_of: Callable[[int], Tensor]) -> Iterator[None]:
        for stage in self.stages:
            stage.tell, stage.worked, stage.submod.loss_of = self.tell, 0.0, loss_of
        try:
            yield
        finally:
            for stage in self.stages:
                stage.submod.loss_of = None

    def _told(self, losses: Tensor | None, device: Any) -> Tensor:
        """The losses, which the last run's stage alone has, on every stage."""
        if losses is None:
            losses = torch.zeros(self.micro, device=device)
        cut, places = self.staged.cut, self.staged.places
        dist.broadcast(losses, src=places.rank(cut.homes[-1]), group=places.pipe)
        return losses

    def begin(self, subject: Subject, batch: Any, device: Any) -> None:
        """Make stages and schedule for micro batches like this one."""
        self.borders = self.staged.way.passing(subject, batch)
        self.stages = [self._stage(run, device) for run in self.staged.cut.blocks]
        self.schedule = self.order.make(self.stages, self.micro, lambda out, target: out.sum())

    def _stage(self, run: int, device: Any) -> Stage:
        cut = self.staged.cut
        end = run == cut.end
        passes = () if end else self.borders[run]
        return self.kind(
            Chunk(self.staged, run, passes),
            run,
            len(cut.homes),
            device,
            input_args=self.borders[run - 1] if run else (),
            output_args=torch.empty(1, device="meta") if end else passes,
            group=self.staged.places.pipe,
        )

    def received(self) -> list[Tensor]:
        """What torch keeps to receive into: inputs and gradients of each micro batch of a step, and
        gradients of the former where it computes those of weights apart."""
        infos = [info for stage in self.stages for room in _rooms(stage) for info in room]
        buffers = [info.buffer for info in infos if info.buffer is not None]
        return [*buffers, *(b.grad for b in buffers if b.is_leaf and b.grad is not None)]


def _rooms(stage: Stage) -> list[Any]:
    return [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
