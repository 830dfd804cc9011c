"""Negative controls of a pipeline: ways in which its stages can fail to be one training, done on
purpose as in ``harness.worker.sabotage``. None of them raises an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.worker.loop import Run

__all__ = ["NUMBERS", "STAGES"]


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
        chunk = pipe.stage.submod
        forward = chunk.forward

        def without_the_last(*received: Any) -> Any:
            out = forward(*received)
            if chunk.staged.cut.last and chunk.number == pipe.micro - 1:
                out.register_hook(lambda gradient: gradient * 0)
            return out

        chunk.forward = without_the_last

    _once_there_is_a_schedule(run, lose)


def conditions_of_another_micro_batch(run: Run) -> None:
    """Behind the first stage, blocks are given the condition that passed before."""

    def mix(pipe: Any) -> None:
        chunk, before = pipe.stage.submod, []
        forward = chunk.forward

        def with_an_older(*received: Any) -> Any:
            before.append(received[1:])
            return forward(*received[:1], *before[max(0, len(before) - 2)])

        if not chunk.staged.cut.first:
            chunk.forward = with_an_older

    _once_there_is_a_schedule(run, mix)


def norm_of_one_stage(run: Run) -> None:
    """Squares of the gradients are not added up over the stages."""
    from strategies.engine import Engine

    engine = run.trained.engine
    object.__setattr__(engine, "norm", functools.partial(Engine.norm, engine))  # it is frozen


def all_forward_before_any_backward(run: Run) -> None:
    """gpipe in the place of 1f1b: the same numbers, and more memory."""
    from strategies.engines.pipeline.schedules import SCHEDULES

    run.trained.model.pipe.order = SCHEDULES["gpipe"]


def every_stage_keeps_the_whole_model(run: Run) -> None:
    """Each rank holds all blocks and steps its own: nothing is saved."""
    import torch

    module = run.trained.module
    for name, p in run.trained.model.cut.elsewhere.items():
        weight = torch.nn.Parameter(torch.zeros(p.shape), requires_grad=False)
        module.register_parameter(name.replace(".", "_"), weight)


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
STAGES = NUMBERS | {
    change.__name__: change
    for change in (all_forward_before_any_backward, every_stage_keeps_the_whole_model)
}
"""The same, and ways in which what is held or kept becomes other than was asked for."""
