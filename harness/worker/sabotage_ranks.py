"""Negative controls of several ranks: ways in which what each of them does can fail to be one
training, done on purpose as in ``harness.worker.sabotage``. Losses alone forgive most of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.worker.loop import Run


LATER = 100
"""Steps by which samples of another rank are others."""


def one_rank_left_out(run: Run) -> None:
    """The last rank adds nothing to the gradients, the others as much more: their size stays."""
    here = run.trained.accelerator
    last = here.process_index == here.num_processes - 1
    scale = 0.0 if last else here.num_processes / (here.num_processes - 1)
    backward = here.backward
    here.backward = lambda loss: backward(loss * scale)


def attention_of_own_tokens(run: Run) -> None:
    """Attention sees the tokens of this rank's part alone."""
    from strategies.parallel.sequence import attention

    attention.keep_to_own(run.trained.module, run.trained.subject)


def positions_of_the_first_part(run: Run) -> None:
    """Every rank's tokens have the positions of the first rank's."""
    trained = run.trained
    trained.subject.take_part(trained.module, 0, trained.launch.layout.sequence)


def parts_not_joined(run: Run) -> None:
    """Each rank takes its own part of a prediction for all parts."""
    from harness.sampling import batch

    def own_alone(trained: Any, part: Any, samples: Any, known: Any) -> Any:
        return part.repeat(1, 1, trained.launch.layout.sequence, 1)

    batch.join = own_alone


def samples_of_their_own(run: Run) -> None:
    """Ranks that are to work on parts of the same samples take parts of different ones."""
    layout, batches = run.trained.launch.layout, run.feed.micro_batches
    part = layout.part(run.trained.accelerator.process_index)
    run.feed.micro_batches = lambda step: batches(step + LATER * part)


def gradients_not_averaged(run: Run) -> None:
    """Each rank keeps the gradients of its own part."""
    run.trained.model.require_backward_grad_sync = False


def heads_dealt_as_they_lie(run: Run) -> None:
    """Each rank has neighbouring rows of the packed queries, keys and values: the first all queries
    and half of the keys, and takes them for its heads."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    trained = run.trained
    packed = [p for block in trained.blocks() for p in block.attn.qkv.parameters()]
    with torch.no_grad():
        for p, whole in zip(packed, trained.engine.whole(trained, packed), strict=True):
            mine = whole.chunk(p.share.parts)[p.share.index]
            if isinstance(p, DTensor):
                mine = distribute_tensor(mine, p.device_mesh, p.placements, src_data_rank=None)
            p.copy_(mine)


def products_not_summed(run: Run) -> None:
    """Each rank goes on with what its own part of the weights makes."""
    _alone(run, "RowParallel")


def gradients_not_summed(run: Run) -> None:
    """What is before a cut layer learns from this rank's part of it alone."""
    _alone(run, "ColumnParallel")


def _alone(run: Run, kind: str) -> None:
    """Cut layers of this kind are ordinary ones, of their part."""
    from torch import nn

    from strategies.parallel.tensor import layers

    for layer in layers.parallel_layers(run.trained.module):
        if isinstance(layer, getattr(layers, kind)):
            layer.forward = nn.Linear.forward.__get__(layer)


def norm_of_own_parts(run: Run) -> None:
    """Gradients are clipped by the norm of those that this rank has."""
    from torch import nn

    trained = run.trained
    limit = trained.settings.grad_clip or float("inf")
    trained.gradient_norm = lambda: nn.utils.clip_grad_norm_(trained.module.parameters(), limit)


def modulation_of_own_tokens(run: Run) -> None:
    """What shifts, scales and gates the tokens learns from this rank's alone."""
    from strategies.parallel.tensor import layers

    layers.spread = lambda out, group: out


RANKS: dict[str, Callable[[Run], None]] = {one_rank_left_out.__name__: one_rank_left_out}
"""Name -> what is done to a run of several replicas before its first step."""
SHARED: dict[str, Callable[[Run], None]] = {
    change.__name__: change
    for change in (
        attention_of_own_tokens,
        positions_of_the_first_part,
        samples_of_their_own,
        gradients_not_averaged,
    )
}
"""Name -> what is done to a run of ``ddp+sp`` before its first step."""
DRAWN: dict[str, Callable[[Run], None]] = {
    change.__name__: change
    for change in (attention_of_own_tokens, positions_of_the_first_part, parts_not_joined)
}
"""Name -> what is done to ranks of ``ddp+sp`` before they draw."""
CUT: dict[str, Callable[[Run], None]] = {
    change.__name__: change
    for change in (
        heads_dealt_as_they_lie,
        products_not_summed,
        gradients_not_summed,
        norm_of_own_parts,
    )
}
"""Name -> what is done to a run of ``ddp+tp`` before its first step."""
BETWEEN: dict[str, Callable[[Run], None]] = {
    modulation_of_own_tokens.__name__: modulation_of_own_tokens
}
"""The same, of ``ddp+tp:norms=tokens``."""


# ---- sabotage stages ----
# Negative controls of a pipeline: ways in which its stages can fail to be one training, done on
# purpose as in ``harness.worker.sabotage``. None of them raises an error.


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
    from strategies.engines.fsdp import shard

    def lose(stage: Any, micro: int) -> None:
        backward = stage.backward_one_chunk

        def alone(number: int, *given: Any, **named: Any) -> None:
            for p in shard.gathered(stage.submod.own) if number == micro - 1 else ():
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
