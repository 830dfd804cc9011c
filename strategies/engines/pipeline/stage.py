"""The model of one stage as a training step calls it, and a step run by torch's schedule.

torch's schedules, stages, sends and receives are used. torch 2.13's ``pipeline()``, which cuts a
model by tracing it, was tried with gloo: losses agree, and it does not serve. It drops activation
checkpointing without an error: a small SD3.5 keeps 1,038,976 bytes for backward instead of 102,656.
Its first stage takes inputs in an order of its own. A DiT's stage fails with "input tensor has to
be contiguous".

A schedule runs forward and backward of all micro-batches. Every stage computes the loss of a
micro-batch as other engines do. The model is called for this. It runs the blocks of one run
on the received tensors and ends by raising ``Handed``. After the last run it returns its output as
usual.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_leaves, tree_unflatten

from strategies import initial
from strategies.engines.pipeline.cut import Cut, Output, Passage, Shaped, Watched, taken, usual
from strategies.engines.pipeline.schedules import BACKWARD, FORWARD, WEIGHTS, Part, Schedule
from strategies.parallel import groups
from strategies.subject import Subject

BUCKET = 25 * 2**20
"""Bytes of gradients that are averaged at a time: DDP's bucket size."""


@dataclass(frozen=True)
class StageRanks:
    """Coordinates and groups of one rank. Ranks of one stage are neighbours (``Layout``): gradients
    are averaged over the shortest wires, and tokens, which are fewer bytes, pass over longer ones.

    ``stage``; ``share``: index of its pipeline, of ``data`` pipelines that work on different
    samples. ``pipe``: group of the ranks of its pipeline; None means all ranks. ``replicas``: group
    of the ranks of its stage; None means this rank alone."""

    stage: int
    share: int
    data: int
    pipe: Any = None
    replicas: Any = None

    def rank(self, stage: int) -> int:
        """Return the rank that has a stage of this pipeline."""
        return stage * self.data + self.share

    def average(self, gradients: Iterable[Tensor]) -> None:
        """Average gradients over this stage's replicas, in place."""
        if self.data > 1:
            _added_up(gradients, self.data, self.replicas)

    def add_up(self, gradients: Iterable[Tensor], micro: int) -> None:
        """Sum gradients over the stages of this pipeline and divide them by ``micro``, in place."""
        _added_up(gradients, micro, self.pipe)

    def everyone(self, value: Any) -> list[Any]:
        """Return ``value`` of each stage of this pipeline, in order, on all of them."""
        told: list[Any] = [None] * dist.get_world_size(self.pipe)
        dist.all_gather_object(told, value, group=self.pipe)
        return told


def stage_ranks(rank: int, ranks: int, data: int) -> StageRanks:
    """Make the coordinates and groups of ``rank``; all ranks call it."""
    if data == 1:
        return StageRanks(rank, 0, 1)
    own = groups.made(data, ranks)
    return StageRanks(rank // data, rank % data, data, pipe=own.alike, replicas=own.parts)


def _added_up(gradients: Iterable[Tensor], over: int, group: Any) -> None:
    for some in _take_tensors(gradients, BUCKET):
        bucket = _flatten_dense_tensors(some)
        dist.all_reduce(bucket.div_(over), group=group)
        torch._foreach_copy_(some, _unflatten_dense_tensors(bucket, some))


Borders = list[tuple[Tensor, ...]]
"""The tensors, on meta, that pass behind each run of blocks except the last."""


class Handed(Exception):
    """Ends a forward pass behind a run: ``tensors`` for the next run, and ``outputs`` of the blocks
    so far. Other stages compute the loss."""

    def __init__(self, tensors: tuple[Tensor, ...], outputs: Sequence[Output] = ()) -> None:
        super().__init__("the loss is another stage's")
        self.tensors, self.outputs = tensors, outputs


def way_of(module: nn.Module, cut: Cut) -> Entered | OwnForward:
    """Return the object that runs a cut model's runs of blocks."""
    return Entered(module, cut) if cut.passage is None else OwnForward(module, cut, cut.passage)


class Entered:
    """Runs of a model with the part "ends": the first begins with ``enter``, the last ends with
    ``leave``."""

    def __init__(self, module: nn.Module, cut: Cut) -> None:
        self.module, self.cut = module, cut

    def own(
        self, run: int, received: Sequence[Tensor], outputs: Any, given: Any, named: Any
    ) -> Any:
        """Run one run of this stage on the ``received`` tensors. The model was called with
        ``given`` and ``named``.

        Raises:
            Handed: behind every run except the last.
        """
        module = self.module
        hidden = module.enter(*given, **named) if run == 0 else received
        hidden = (module.run_blocks(tuple(self.cut.blocks[run]), *hidden), *hidden[1:])
        if run == self.cut.end:
            return module.leave(*hidden, *given, **named)
        raise Handed(tuple(tensor.contiguous() for tensor in hidden))

    def passing(self, subject: Subject, batch: Any) -> Borders:
        """Return the tensors that pass for a micro-batch like this one, from a forward pass of the
        whole model without memory."""
        with initial.valueless(), torch.no_grad():
            whole = subject.make().to(_floating(self.module))
            x, t_B = batch.x.to("meta"), batch.t.to("meta")
            conditions = {name: value.to("meta") for name, value in batch.conditions.items()}
            whole.run_blocks = _noted
            try:
                subject.predict(whole, x, t_B, conditions)
            except Handed as left:
                alike = [(t.shape, t.dtype) for t in left.tensors]
                return [_room(alike) for _ in range(self.cut.end)]
        raise AssertionError("the model has not run its blocks by run_blocks")


class OwnForward:
    """Runs of any other model: its own forward pass, with placeholders for the blocks of other
    runs; it ends behind a run's last block."""

    def __init__(self, module: nn.Module, cut: Cut, known: Passage) -> None:
        self.module, self.cut, self.known = module, cut, known
        self.outputs: Sequence[Output] = known.outputs
        self.called: Callable[..., Any] = module
        self.placeholder_calls = 0
        """Calls of placeholders."""

    def own(
        self, run: int, received: Sequence[Tensor], outputs: Any, given: Any, named: Any
    ) -> Any:
        """See ``Entered.own``. ``outputs`` of earlier blocks are given if their shapes are not
        those of a step."""
        cut, (first, end) = self.cut, self.cut.bounds(run)
        there = [*(outputs or self.outputs)[:first]]
        made = dict(zip(self.known.alive[first], received, strict=True))

        def ends(number: int, out: Any) -> Any:
            there.append(Output.of(out))
            made.update({(number, leaf): value for leaf, value in enumerate(tree_leaves(out))})
            if number == end - 1 and run < cut.end:
                left = (made[place].contiguous() for place in self.known.alive[end])
                raise Handed(tuple(left), there)
            return out

        standing: dict[int, nn.Module] = {n: self._for(n, there, made) for n in range(first)}
        for number, block in enumerate(cut.blocks[run], first):
            standing[number] = Watched(block, _of(ends, number))
        for number in range(end, cut.depth):
            standing[number] = Missing(number)
        with cut.slots.hold(standing):
            return self.called(*given, **named)

    def _for(self, number: int, there: Sequence[Output], made: Any) -> Placeholder:
        def stood() -> None:
            self.placeholder_calls += 1

        spec, leaves = there[number]
        values = [made.get((number, leaf), value) for leaf, value in enumerate(leaves)]
        return Placeholder(values, spec, stood)

    def passing(self, subject: Subject, batch: Any) -> Borders:
        """See ``Entered.passing``."""
        asked = [batch.x, batch.t, *batch.conditions.values()]
        facts = [(t.shape, t.dtype) for t in asked]

        def sample() -> tuple[Any, ...]:
            x, t_B, *others = (torch.empty(shape, dtype=dtype) for shape, dtype in facts)
            return x, t_B, dict(zip(batch.conditions, others, strict=True))

        kind, found = _floating(self.module), self.known
        if not usual(subject, kind, batch.x, batch.t, batch.conditions):
            found = taken(subject, sample, kind)
        self.outputs = found.outputs
        return [_room(found.shaped(self.cut.bounds(run)[1])) for run in range(self.cut.end)]


class Placeholder(nn.Module):
    """Replaces a block of another run: returns the tensors received of it. A tensor that nothing
    reads is zeros expanded to its shape, which take no memory."""

    def __init__(self, values: Sequence[Any], spec: Any, stood: Callable[[], None]) -> None:
        super().__init__()
        self.values, self.spec, self.stood = values, spec, stood

    def forward(self, *given: Any, **named: Any) -> Any:
        """Return the block's output."""
        self.stood()
        device = next(t.device for t in tree_leaves((given, named)) if torch.is_tensor(t))
        return tree_unflatten([_filled(value, device) for value in self.values], self.spec)


class Missing(nn.Module):
    """Replaces a block behind the run, which must not be called."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, *given: Any, **named: Any) -> Any:
        """Refuse the call: the stages run the blocks.

        Raises:
            AssertionError: always.
        """
        raise AssertionError(f"block {self.number} ran before the run in front of it had ended")


def _filled(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Shaped):
        return value
    return torch.zeros((), dtype=value.dtype, device=device).expand(value.shape)


def _of(function: Callable[..., Any], number: int) -> Callable[[Any], Any]:
    return lambda out: function(number, out)


def _room(facts: Sequence[tuple[torch.Size, torch.dtype]]) -> tuple[Tensor, ...]:
    with initial.valueless():
        return tuple(torch.empty(s, dtype=d, requires_grad=True) for s, d in facts)


def _noted(blocks: Any, *hidden: Tensor) -> Tensor:
    raise Handed(hidden)


def _floating(module: nn.Module) -> torch.dtype:
    return next(p.dtype for p in module.parameters() if p.is_floating_point())


class Staged(nn.Module):
    """A cut model, called as the whole one. ``run``: the run of blocks to compute on the tensors
    ``received`` from the run before. None outside a step: then a forward pass goes through all
    stages and every rank returns the output."""

    def __init__(self, module: nn.Module, cut: Cut, ranks: StageRanks) -> None:
        super().__init__()
        self.module, self.cut, self.ranks = module, cut, ranks
        self.way = way_of(module, cut)
        self.run: int | None = None
        self.received: tuple[Tensor, ...] = ()
        self.pipe: Pipe | None = None

    def forward(self, *given: Any, **named: Any) -> Any:
        """Return the whole model's output behind the last run.

        Raises:
            Handed: behind the other runs, within a step.
        """
        if self.run is None:
            return self._through(*given, **named)
        return self._own(self.run, self.received, (), given, named)

    def _own(self, run: int, *given: Any) -> Any:
        return self.way.own(run, *given)

    def _through(self, *given: Any, **named: Any) -> Any:
        """Compute run after run while the other stages wait; there is no backward."""
        found: list[Any] = [(), ()]
        for run, home in enumerate(self.cut.homes):
            if home == self.cut.index:
                try:
                    found = [self._own(run, *found, given, named), ()]
                except Handed as left:
                    found = [left.tensors, left.outputs]
            dist.broadcast_object_list(found, src=self.ranks.rank(home), group=self.ranks.pipe)
        return found[0]


class Chunk(nn.Module):
    """The module of torch's stage of one ``run``: the loss of micro-batch ``number``."""

    def __init__(self, staged: Staged, run: int, passes: Sequence[Tensor]) -> None:
        super().__init__()
        # torch collects weights from this module: the model of all runs must be hidden.
        object.__setattr__(self, "staged", staged)
        self.own = nn.ModuleList(staged.cut.parts(staged.module, run))
        self.shared = nn.ParameterList(staged.cut.common(staged.module))
        self.run, self.passes = run, passes
        self.loss_of: Any = None
        self.number = 0

    def forward(self, *received: Tensor) -> Any:
        self.staged.run, self.staged.received = self.run, received
        try:
            return self.loss_of(self.number).reshape(1)
        except Handed as left:
            # Autocast may give another type than that of the next stage's buffers.
            return tuple(t.to(p.dtype) for t, p in zip(left.tensors, self.passes, strict=True))
        finally:
            self.staged.run, self.staged.received = None, ()


class Stage(PipelineStage):
    """torch's stage, which reports its work: ``tell`` is called with each ``Part`` before it runs
    and with None after it. ``worked``: seconds of all parts."""

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
        """See torch's. Gradients of shared weights are divided where they are summed."""
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
    """This rank's torch stages, one a run of blocks, and their schedule. They are made for the
    shapes of the first micro-batch."""

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
        """(seconds of work, seconds until the end of the last work) of each step."""

    def step(self, batches: Sequence[Any], loss_of: Callable[[Any], Tensor]) -> Tensor:
        """Run forward and backward of all micro-batches; return their losses [micro] everywhere."""
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
        """Broadcast the losses from the stage of the last run."""
        if losses is None:
            losses = torch.zeros(self.micro, device=device)
        cut, ranks = self.staged.cut, self.staged.ranks
        dist.broadcast(losses, src=ranks.rank(cut.homes[-1]), group=ranks.pipe)
        return losses

    def begin(self, subject: Subject, batch: Any, device: Any) -> None:
        """Make stages and schedule for micro-batches like this one."""
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
            group=self.staged.ranks.pipe,
        )

    def received(self) -> list[Tensor]:
        """Return torch's receive buffers: inputs and gradients of each micro-batch, and gradients
        of the inputs if those of weights are computed separately."""
        infos = [info for stage in self.stages for room in _rooms(stage) for info in room]
        buffers = [info.buffer for info in infos if info.buffer is not None]
        return [*buffers, *(b.grad for b in buffers if b.is_leaf and b.grad is not None)]


def _rooms(stage: Stage) -> list[Any]:
    return [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
