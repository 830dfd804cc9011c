"""A model cut by hand into stages, as torchtitan cuts its models, and a step by torch's schedule.

Each rank keeps its blocks, under their own names, and the ends of the model that it uses. torch
2.13's ``pipeline()``, which cuts a model by tracing it, drops activation checkpointing silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed import checkpoint, pipelining
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.pipelining import PipelineStage

from strategies import initial
from strategies.engines.pipeline.schedules import Schedule, dealt
from strategies.initial import Draw

if TYPE_CHECKING:
    from strategies.engine import TrainingRun

BUCKET = 25 * 2**20
"""Bytes of gradients that are averaged at a time: DDP's bucket size."""
KEY = "stages_cut"
"""Attribute of a bare model that holds its ``Cut``."""
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
"""Optimizer state by parameter name: its number in a stage's optimizer is no other stage's."""


@dataclass
class Cut:
    """Part of a model that stage ``index`` of ``count`` keeps: ``blocks`` of each of its runs.

    ``runs``: runs of blocks in the whole model; run n is on stage n modulo ``count``. ``owners``:
    parameter name, in the whole model's order -> its stage. ``elsewhere``: those of other stages,
    on meta.
    """

    index: int
    count: int
    runs: int
    blocks: dict[int, list[nn.Module]] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    elsewhere: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def last(self) -> bool:
        """True if this stage has the last run, which the output and the loss follow."""
        return self.runs - 1 in self.blocks

    def parts(self, module: nn.Module, run: int) -> Iterator[nn.Module]:
        """Yield the modules that only this run uses: its blocks, and its end of the model."""
        yield from self.blocks[run]
        before, behind = module.ends
        for name in (*before * (run == 0), *behind * (run == self.runs - 1)):
            part = getattr(module, name)
            yield part if isinstance(part, nn.Module) else nn.ParameterList([part])


def cut(module: nn.Module, blocks: Sequence[nn.Module], index: int, count: int, runs: int) -> Cut:
    """Remove the parts of ``module`` that belong to other stages than ``index``."""
    if KEY in vars(module):
        return vars(module)[KEY]
    made = Cut(index, count, runs, owners=owners(module, blocks, count, runs))
    for run, (first, end) in enumerate(dealt(len(blocks), runs)):
        if run % count == index:
            made.blocks[run] = list(blocks[first:end])
    with initial.valueless():
        for name, p in module.named_parameters():
            if made.owners[name] != index:
                empty = torch.empty(p.shape, dtype=p.dtype)
                made.elsewhere[name] = nn.Parameter(empty, p.requires_grad)
    foreign = {*blocks}.difference(*made.blocks.values())
    for parent in [*module.modules()]:
        for key, child in [*parent._modules.items()]:
            if child in foreign:
                del parent._modules[key]  # what stays keeps its number
    for stage, names in zip((0, (runs - 1) % count), module.ends, strict=True):
        for name in names if stage != index else ():
            setattr(module, name, None)
    vars(module)[KEY] = made
    return made


def owners(module: nn.Module, blocks: Sequence[nn.Module], count: int, runs: int) -> dict[str, int]:
    """Return the stage of each parameter of a whole model, by name."""
    stage_of = {
        p: run % count
        for run, (first, end) in enumerate(dealt(len(blocks), runs))
        for block in blocks[first:end]
        for p in block.parameters()
    }
    before, last = tuple(module.ends[0]), (runs - 1) % count
    return {
        name: stage_of.get(p, 0 if name.startswith(before) else last)
        for name, p in module.named_parameters()
    }


def fill(
    module: nn.Module, draw: Draw, blocks: Sequence[nn.Module], place: tuple[int, int, int], on: Any
) -> None:
    """Cut ``module`` to the stage ``place`` (index, count, runs) and set its first values on the
    device ``on``."""
    waits = initial.waits(module)
    made = cut(module, blocks, *place)
    for name, p in made.elsewhere.items() if waits else ():
        draw(name, p)  # every rank hashes all first weights
    initial.fill(module, draw, on)
    module.to(on)


# ---- ranks ----


@dataclass(frozen=True)
class StageRanks:
    """Coordinates and groups of one rank. Ranks of one stage are neighbours (``Layout``): gradients
    are more bytes than tokens, and averaged over the shortest wires.

    ``share``: index of its pipeline, of ``data`` pipelines that work on different samples.
    ``pipe``: group of the ranks of its pipeline; None: all. ``replicas``: group of the ranks of its
    stage; None: this rank alone."""

    share: int
    data: int
    pipe: Any = None
    replicas: Any = None

    def rank(self, stage: int) -> int:
        """Return the rank that has a stage of this pipeline."""
        return stage * self.data + self.share

    def average(self, gradients: Iterable[Tensor]) -> None:
        """Average gradients over this stage's replicas, in place."""
        if self.data == 1:
            return
        for some in _take_tensors(gradients, BUCKET):
            bucket = _flatten_dense_tensors(some)
            dist.all_reduce(bucket.div_(self.data), group=self.replicas)
            torch._foreach_copy_(some, _unflatten_dense_tensors(bucket, some))

    def everyone(self, value: Any) -> list[Any]:
        """Return ``value`` of each stage of this pipeline, in order, on all of them."""
        found: list[Any] = [None] * dist.get_world_size(self.pipe)
        dist.all_gather_object(found, value, group=self.pipe)
        return found


# ---- a step ----


class BlockRun(nn.Module):
    """Module of torch's stage: the blocks of one ``run``, for micro-batch ``number``."""

    def __init__(self, staged: Staged, run: int) -> None:
        super().__init__()
        # torch collects weights from this module: the model of all runs must be hidden.
        object.__setattr__(self, "staged", staged)
        self.own = nn.ModuleList(staged.cut.parts(staged.module, run))
        self.run, self.number = run, 0

    def forward(self, *received: Tensor) -> Any:
        """Return the tensors for the next run; the last run returns the loss [1]."""
        staged = self.staged
        with staged.autocast():
            hidden = staged.ran(self.run, received or staged.entered(self.number))
        if self.run == staged.cut.runs - 1:
            return staged.loss(self.number, hidden).reshape(1)
        # Autocast may give another type than that of the next stage's buffers.
        pairs = zip(hidden, staged.rooms, strict=True)
        return tuple(t.to(room.dtype).contiguous() for t, room in pairs)


class Stage(PipelineStage):
    """torch's stage, which says when it begins to run forward and backward."""

    def forward_one_chunk(self, number: int, *given: Any, **named: Any) -> Any:
        self.submod.number = number
        self.submod.staged.enter("forward")
        return super().forward_one_chunk(number, *given, **named)

    def backward_one_chunk(self, *given: Any, **named: Any) -> None:
        self.submod.staged.enter("backward")
        super().backward_one_chunk(*given, **named)


class Staged(nn.Module):
    """A cut model. Within a step the loss calls it on the last stage, where it returns the output
    behind the last run. Any other call goes through all stages, and every rank returns the output.

    ``rooms``: the tensors that pass between runs, on meta. ``enter``: called with the phase of a
    step that begins.
    """

    def __init__(self, module: nn.Module, made: Cut, ranks: StageRanks, autocast: Any) -> None:
        super().__init__()
        self.module, self.cut, self.ranks, self.autocast = module, made, ranks, autocast
        self.enter: Callable[[str], None] = lambda phase: None
        self.rooms: tuple[Tensor, ...] = ()
        self.stages: list[Stage] = []
        self.schedule: Any = None
        self._hidden: tuple[Tensor, ...] = ()
        self._step: Any = None

    def forward(self, *given: Any) -> Any:
        """Return the whole model's output."""
        if self._step is not None:
            return self.module.leave(*self._hidden, *given)
        found: list[Any] = [()]
        for run in range(self.cut.runs):
            if run in self.cut.blocks:
                hidden = self.ran(run, found[0] if run else self.module.enter(*given))
                end = run == self.cut.runs - 1
                found = [self.module.leave(*hidden, *given) if end else hidden]
            source = self.ranks.rank(run % self.cut.count)
            dist.broadcast_object_list(found, src=source, group=self.ranks.pipe)
        return found[0]

    def ran(self, run: int, hidden: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what the blocks of a run make of the tensors ``hidden``."""
        x, *rest = hidden
        return (self.module.run_blocks(tuple(self.cut.blocks[run]), x, *rest), *rest)

    def entered(self, number: int) -> Any:
        """Return what the first block takes of a micro-batch."""
        run, batches = self._step
        x, t_B = run.inputs(batches[number])
        return run.subject.predict(self.module.enter, x, t_B, batches[number].conditions)

    def loss(self, number: int, hidden: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of a micro-batch whose last block returned ``hidden``."""
        run, batches = self._step
        self._hidden = hidden
        try:
            return run.loss(batches[number])
        finally:
            self._hidden = ()

    def step(self, run: TrainingRun, batches: Sequence[Any], order: Schedule) -> Tensor:
        """Run forward and backward of all micro-batches; return their losses [micro] everywhere."""
        self._step = (run, batches)
        if self.schedule is None:
            self._begin(order)
        losses: list[Tensor] = []
        target = torch.zeros(len(batches)) if self.cut.last else None
        self.schedule.step(target=target, losses=losses, return_outputs=False)
        found = torch.zeros(len(batches), device=batches[0].t.device)
        found = torch.stack([x.detach() for x in losses]) if losses else found
        last = self.ranks.rank((self.cut.runs - 1) % self.cut.count)
        dist.broadcast(found, src=last, group=self.ranks.pipe)
        self._step = None
        return found

    def _begin(self, order: Schedule) -> None:
        """Make stages and schedule for micro-batches like those of this step."""
        run, batches = self._step
        subject = run.subject
        kind = next(p.dtype for p in self.module.parameters() if p.is_floating_point())
        with initial.valueless(), torch.no_grad():
            conditions = {n: value.to("meta") for n, value in batches[0].conditions.items()}
            x, t_B = (value.to("meta") for value in run.inputs(batches[0]))
            hidden = subject.predict(subject.make().to(kind).enter, x, t_B, conditions)
            # Contiguous, as what is received: a patch embedding transposes its tokens.
            rooms = (torch.empty(t.shape, dtype=t.dtype, requires_grad=True) for t in hidden)
            self.rooms = tuple(rooms)
        runs = self.cut.runs
        self.stages = [
            Stage(
                BlockRun(self, n), n, runs, batches[0].t.device, self.rooms if n else (),
                output_args=self.rooms if n < runs - 1 else torch.empty(1, device="meta"),
                group=self.ranks.pipe,
            )
            for n in self.cut.blocks
        ]  # fmt: skip
        # The loss is a micro-batch's mean, so gradients are divided by their number.
        self.schedule = getattr(pipelining, order.kind)(
            self.stages if order.runs > 1 else self.stages[0],
            len(batches),
            loss_fn=lambda out, target: out.sum(),
            scale_grads=True,
        )

    def received(self) -> list[Tensor]:
        """Return torch's receive buffers: inputs and gradients of each micro-batch."""
        rooms = [r for s in self.stages for r in (s.args_recv_info, s.grad_recv_info)]
        infos = [info for room in rooms for infos in room.values() for info in infos]
        return [info.buffer for info in infos if info.buffer is not None]


# ---- whole parameters, and checkpoints ----


def whole(run: TrainingRun, parameters: Sequence[Any]) -> Iterator[Tensor]:
    """Yield each of ``parameters`` (values of ``Engine.global_parameters``, alike on all ranks)
    from its stage, on every rank; it is valid until the next one."""
    made, ranks, device = run.model.cut, run.model.ranks, run.accelerator.device
    names = {p: name for name, p in run.engine.global_parameters(run).items()}
    for p in parameters:
        stage = made.owners[names[p]]
        found = p.detach() if stage == made.index else torch.empty_like(p, device=device)
        dist.broadcast(found, src=ranks.rank(stage), group=ranks.pipe)
        yield found


def save(run: TrainingRun, path: Path) -> None:
    """Write this stage's parameters and their optimizer state, by the whole model's names; all
    ranks call it."""
    model, state = get_state_dict(run.module, run.inner_optimizer, options=BY_NAME)
    checkpoint.save({"model": model, "optimizer": state}, checkpoint_id=path)


def load(run: TrainingRun, path: Path) -> None:
    """Read what ``save`` wrote; all ranks call it."""
    module, optimizer = run.module, run.inner_optimizer
    model, state = get_state_dict(module, optimizer, options=BY_NAME)
    found = {"model": model, "optimizer": state}
    checkpoint.load(found, checkpoint_id=path)  # puts other values into ``found``
    given = {"model_state_dict": found["model"], "optim_state_dict": found["optimizer"]}
    set_state_dict(module, optimizer, **given, options=BY_NAME)
