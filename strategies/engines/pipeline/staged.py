"""The model of one stage as a training step calls it, and a step run by torch's schedule.

A schedule runs forward and backward of all micro batches by itself. So that there is one loss and
one way to a prediction for all engines, every stage asks for the loss of a micro batch as any
engine does; where the model is called on the way there, a stage runs its own blocks on what it
received, and leaves with what it hands on (``Handed``), but for the last, from which prediction and
loss go their usual way.
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

from strategies import initial
from strategies.engines.pipeline.cut import Cut
from strategies.engines.pipeline.schedules import Schedule
from strategies.subject import Subject

__all__ = ["Handed", "Pipe", "Stage", "Staged"]


class Handed(Exception):
    """What a stage hands on to the next: ``tensors``. It ends the way to a loss that others take
    to its end."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__("the loss is another stage's")
        self.tensors = tensors


class Staged(nn.Module):
    """A cut model, called as the whole one is. ``received``: what the stage before handed on; None
    outside a step, when a prediction goes through all stages at once and every rank has it."""

    def __init__(self, module: nn.Module, cut: Cut, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.module, self.cut, self.blocks = module, cut, tuple(blocks)
        self.received: tuple[Tensor, ...] | None = None
        self.pipe: Pipe | None = None

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """The prediction, on the last stage.

        Raises:
            Handed: on the others, within a step.
        """
        if self.received is None:
            return self._through(*given, **named)
        return self._own(self.received, given, named)

    def _own(self, received: tuple[Tensor, ...], given: Any, named: Any) -> Tensor:
        module = self.module
        hidden = module.enter(*given, **named) if self.cut.first else received
        hidden = (module.run_blocks(self.blocks, *hidden), *hidden[1:])
        if self.cut.last:
            return module.leave(*hidden)
        raise Handed(tuple(tensor.contiguous() for tensor in hidden))

    def _through(self, *given: Any, **named: Any) -> Tensor:
        """From stage to stage, each while the others wait; no gradient can go back."""
        found: list[Any] = [None]
        for stage in range(self.cut.count):
            if stage == self.cut.index:
                try:
                    found = [self._own(found[0], given, named)]
                except Handed as left:
                    found = [left.tensors]
            dist.broadcast_object_list(found, src=stage)
        return found[0]


class Chunk(nn.Module):
    """What torch's stage runs: the way to the loss of micro batch ``number``."""

    def __init__(self, staged: Staged, passes: Sequence[Tensor]) -> None:
        super().__init__()
        self.staged, self.passes = staged, passes
        self.loss_of: Callable[[int], Tensor] | None = None
        self.number = 0

    def forward(self, *received: Tensor) -> Any:
        self.staged.received = received
        try:
            return self.loss_of(self.number).reshape(1)
        except Handed as left:
            # Autocast may leave another type than the one that the next stage made room for.
            return tuple(t.to(p.dtype) for t, p in zip(left.tensors, self.passes, strict=True))
        finally:
            self.staged.received = None


class Stage(PipelineStage):
    """torch's stage, which says what it runs: ``tell`` is called before each part of a micro batch
    with "forward" or "backward" and its number, and with "" when that part is over. ``worked``:
    seconds that these parts took."""

    tell: Callable[[str, int], None] = staticmethod(lambda what, number: None)
    worked = 0.0

    def forward_one_chunk(self, number: int, *given: Any, **named: Any) -> Any:
        """See torch's."""
        self.submod.number = number
        with self._working("forward", number):
            return super().forward_one_chunk(number, *given, **named)

    def backward_one_chunk(self, number: int, *given: Any, **named: Any) -> None:
        """See torch's."""
        with self._working("backward", number):
            super().backward_one_chunk(number, *given, **named)

    @contextlib.contextmanager
    def _working(self, what: str, number: int) -> Iterator[None]:
        self.tell(what, number)
        began = time.perf_counter()
        yield
        self.worked += time.perf_counter() - began
        self.tell("", number)


class Pipe:
    """This rank's stage and its schedule, made when the first micro batch says what passes."""

    def __init__(self, staged: Staged, schedule: Schedule, micro: int) -> None:
        self.staged, self.micro = staged, micro
        self.order = schedule
        self.stage: Stage | None = None
        self.schedule: Any = None
        self.tell: Callable[[str, int], None] = Stage.tell
        self.seconds: list[tuple[float, float]] = []
        """Of each step: how long this stage worked, and until it had worked for the last time."""

    def step(self, batches: Sequence[Any], loss_of: Callable[[Any], Tensor]) -> Tensor:
        """Forward and backward of all micro batches; their losses, on every rank [micro]."""
        self.stage.tell, self.stage.worked = self.tell, 0.0
        began = time.perf_counter()
        chunk, losses = self.stage.submod, []
        chunk.loss_of = lambda number: loss_of(batches[number])
        last = self.staged.cut.last
        target = torch.zeros(self.micro) if last else None
        try:
            self.schedule.step(target=target, losses=losses, return_outputs=False)
        finally:
            chunk.loss_of = None
        self.seconds.append((self.stage.worked, time.perf_counter() - began))
        found = torch.stack([x.detach() for x in losses]) if last else None
        return self._told(found, batches[0].t.device)

    def _told(self, losses: Tensor | None, device: Any) -> Tensor:
        """The losses, which the last stage alone has, on every stage."""
        if losses is None:
            losses = torch.zeros(self.micro, device=device)
        source = self.staged.cut.count - 1
        dist.broadcast(losses, src=source)
        return losses

    def begin(self, subject: Subject, batch: Any, device: Any) -> None:
        """Make stage and schedule for micro batches like this one."""
        cut, passes = self.staged.cut, passing(subject, self.staged, batch)
        self.stage = Stage(
            Chunk(self.staged, passes),
            cut.index,
            cut.count,
            device,
            input_args=() if cut.first else passes,
            output_args=torch.empty(1, device="meta") if cut.last else passes,
        )
        self.schedule = self.order.make(self.stage, self.micro, lambda out, target: out.sum())

    def received(self) -> list[Tensor]:
        """What torch keeps to receive into: inputs and gradients of each micro batch of a step."""
        if self.stage is None:
            return []
        rooms = [*self.stage.args_recv_info.values(), *self.stage.grad_recv_info.values()]
        return [info.buffer for room in rooms for info in room if info.buffer is not None]


def passing(subject: Subject, staged: Staged, batch: Any) -> tuple[Tensor, ...]:
    """What passes between stages for a micro batch like this one: tensors on meta. It is asked of
    a whole model without memory, since a stage knows neither what comes in nor what is behind."""
    with initial.valueless(), torch.no_grad():
        whole = subject.make().to(_floating(staged.module))
        x, t_B = batch.x.to("meta"), batch.t.to("meta")
        conditions = {name: value.to("meta") for name, value in batch.conditions.items()}
        whole.run_blocks = _noted
        try:
            subject.predict(whole, x, t_B, conditions)
        except Handed as left:
            return tuple(
                torch.empty(tensor.shape, dtype=tensor.dtype, requires_grad=True)
                for tensor in left.tensors
            )
    raise AssertionError("the model has not run its blocks by run_blocks")


def _noted(blocks: Any, *hidden: Tensor) -> Tensor:
    raise Handed(hidden)


def _floating(module: nn.Module) -> torch.dtype:
    return next(p.dtype for p in module.parameters() if p.is_floating_point())
