"""Negative controls of a pipeline: ways in which its stages can fail to be one training, done on
purpose as in ``harness.worker.sabotage``. None of them raises an error.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.worker.loop import Run

__all__ = ["NUMBERS", "REPEATED", "SHARED_NUMBERS", "SPLIT", "STAGES", "STANDING"]


def _once_there_is_a_schedule(run: Run, change: Callable[[Any], None]) -> None:
    """The schedule is made in the first step, when it is known what passes between stages."""
    pipe = run.trained.model.pipe
    begin = pipe.begin

    def begun(*given: Any) -> None:
        begin(*given)
        change(pipe)

    pipe.begin = begun


def gradients_not_divided_by_micro_batches(run: Run) -> None:
    """Gradients are the sum over the micro batches of a step, and not their mean: Adam forgives."""
    _once_there_is_a_schedule(run, lambda pipe: setattr(pipe.schedule, "scale_grads", False))


def last_micro_batch_of_the_schedule_lost(run: Run) -> None:
    """The loss of the last micro batch is told, and no gradient of it goes back."""

    def lose(pipe: Any) -> None:
        chunk = pipe.stages[-1].submod
        forward, end = chunk.forward, chunk.staged.cut.end

        def without_the_last(*received: Any) -> Any:
            out = forward(*received)
            if chunk.run == end and chunk.number == pipe.micro - 1:
                out.register_hook(lambda gradient: gradient * 0)
            return out

        chunk.forward = without_the_last

    _once_there_is_a_schedule(run, lose)


def conditions_of_another_micro_batch(run: Run) -> None:
    """Behind the first stage, blocks are given the condition that passed before."""

    def mix(pipe: Any) -> None:
        chunk, before = pipe.stages[-1].submod, []
        forward = chunk.forward

        def with_an_older(*received: Any) -> Any:
            before.append(received[1:])
            return forward(*received[:1], *before[max(0, len(before) - 2)])

        if chunk.run > 0:
            chunk.forward = with_an_older

    _once_there_is_a_schedule(run, mix)


def norm_of_one_stage(run: Run) -> None:
    """Squares of the gradients are not added up over the stages."""
    from strategies.engine import Engine

    engine = run.trained.engine
    object.__setattr__(engine, "norm", functools.partial(Engine.norm, engine))  # it is frozen


def all_forward_before_any_backward(run: Run) -> None:
    """gpipe in the place of 1f1b, or what torch has of it for several runs of blocks: the same
    numbers, and more memory."""
    pipe = run.trained.model.pipe
    kind = "ScheduleLoopedBFS" if pipe.order.several else "ScheduleGPipe"
    pipe.order = dataclasses.replace(pipe.order, kind=kind)


def every_stage_keeps_the_whole_model(run: Run) -> None:
    """Each rank holds all blocks and steps its own: nothing is saved."""
    import torch

    module = run.trained.module
    for name, p in run.trained.model.cut.elsewhere.items():
        weight = torch.nn.Parameter(torch.zeros(p.shape), requires_grad=False)
        module.register_parameter(name.replace(".", "_"), weight)


def runs_of_blocks_in_another_order(run: Run) -> None:
    """A stage runs the blocks of its second run where those of the first are due."""
    blocks = run.trained.model.cut.blocks
    each = list(blocks.values())
    blocks.update(zip(blocks, each[::-1], strict=True))


def one_parameter_of_the_last_stage_not_stepped(run: Run) -> None:
    """The optimizer of one rank alone lacks a parameter: no other rank can see it."""
    if run.trained.model.cut.last:
        (group,) = run.trained.inner_optimizer.param_groups
        group["params"] = group["params"][:-1]


def weights_of_the_last_micro_batch_lost(run: Run) -> None:
    """Where gradients of weights are computed apart, those of the last micro batch are not: what
    goes back to the stage before is whole."""

    def lose(stage: Any, micro: int) -> None:
        backward, asked = stage.backward_maybe_with_nosync, []

        def without_the_last(kind: str, *given: Any, **named: Any) -> Any:
            asked.append(kind)
            last = kind != "input" and sum(k != "input" for k in asked) % micro == 0
            return ((), None) if last else backward(kind, *given, **named)

        stage.backward_maybe_with_nosync = without_the_last

    def lose_each(pipe: Any) -> None:
        for stage in pipe.stages:
            lose(stage, pipe.micro)

    _once_there_is_a_schedule(run, lose_each)


def gradients_of_replicas_not_averaged(run: Run) -> None:
    """Each pipeline of several steps by its own samples' gradients."""
    ranks = run.trained.model.ranks
    object.__setattr__(ranks, "average", lambda gradients: None)  # it is frozen


def gradients_of_what_all_stages_have_not_added_up(run: Run) -> None:
    """Each stage steps what is in front of all blocks by what its own blocks make of it."""
    ranks = run.trained.model.ranks

    def alone(gradients: Any, micro: int) -> None:
        for gradient in gradients:
            gradient.div_(micro)

    object.__setattr__(ranks, "add_up", alone)  # it is frozen


def blocks_of_others_without_what_was_received(run: Run) -> None:
    """What stands for the blocks before a stage's own returns zeros."""
    way = run.trained.model.way
    own = way.own

    def without(number: int, received: Any, *given: Any) -> Any:
        return own(number, tuple(tensor * 0 for tensor in received), *given)

    way.own = without


def gradients_reduced_for_each_micro_batch(run: Run) -> None:
    """Gradients do not wait for a stage's last micro batch: the same numbers, and more sent."""
    module = run.trained.module
    sync = module.set_requires_gradient_sync
    module.set_requires_gradient_sync = lambda asked, **named: sync(True, **named)


def blocks_gathered_for_each_micro_batch(run: Run) -> None:
    """Gathered weights are freed behind each backward: the same numbers, and more sent."""
    run.trained.model.reshard = True


def gradients_of_sharers_divided_twice(run: Run) -> None:
    """torch's reduction leaves a mean over the sharers, and it is divided by them once more."""
    staged = run.trained.model
    reduce = staged.reduce

    def again(number: int) -> Any:
        groups = reduce(number)
        for p in (p for group in groups for p in group.fsdp_params):
            if p.sharded_param.grad is not None:
                p.sharded_param.grad.div_(staged.ranks.data)
        return groups

    staged.reduce = again


def gradients_of_the_last_micro_batch_alone(run: Run) -> None:
    """What the micro batches before the last one left is not reduced."""
    from strategies.engines.fsdp import facts

    def lose(stage: Any, micro: int) -> None:
        backward = stage.backward_one_chunk

        def alone(number: int, *given: Any, **named: Any) -> None:
            for p in facts.gathered(stage.submod.own) if number == micro - 1 else ():
                p.grad = None
            backward(number, *given, **named)

        stage.backward_one_chunk = alone

    def lose_each(pipe: Any) -> None:
        for stage in pipe.stages:
            lose(stage, pipe.micro)

    _once_there_is_a_schedule(run, lose_each)


NUMBERS: dict[str, Callable[[Run], None]] = {
    change.__name__: change
    for change in (
        gradients_not_divided_by_micro_batches,
        last_micro_batch_of_the_schedule_lost,
        conditions_of_another_micro_batch,
        norm_of_one_stage,
    )
}
"""Name -> what is done to a run of ``pp`` before its first step; the numbers become others."""
SPLIT: dict[str, Callable[[Run], None]] = {
    weights_of_the_last_micro_batch_lost.__name__: weights_of_the_last_micro_batch_lost
}
"""The same, where gradients of weights are computed apart."""
REPEATED: dict[str, Callable[[Run], None]] = {
    gradients_of_replicas_not_averaged.__name__: gradients_of_replicas_not_averaged
}
"""The same, where each stage is there several times."""
STANDING: dict[str, Callable[[Run], None]] = {
    change.__name__: change
    for change in (
        gradients_of_what_all_stages_have_not_added_up,
        blocks_of_others_without_what_was_received,
    )
}
"""The same, where a model runs its blocks in a forward pass of its own."""
SHARED_NUMBERS: dict[str, Callable[[Run], None]] = {
    change.__name__: change
    for change in (gradients_of_sharers_divided_twice, gradients_of_the_last_micro_batch_alone)
}
"""The same, of ``pp_fsdp2``, where ranks share a stage."""
STAGES = {
    **NUMBERS,
    **SPLIT,
    **REPEATED,
    **STANDING,
    **SHARED_NUMBERS,
    **{
        change.__name__: change
        for change in (
            all_forward_before_any_backward,
            every_stage_keeps_the_whole_model,
            runs_of_blocks_in_another_order,
            one_parameter_of_the_last_stage_not_stepped,
            gradients_reduced_for_each_micro_batch,
            blocks_gathered_for_each_micro_batch,
        )
    },
}
"""The same, and ways in which what is held or kept becomes other than was asked for."""
