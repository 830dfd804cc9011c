"""Negative controls for several ranks: deliberate errors that make a joint training incorrect.

They extend ``tests.sabotage``. Losses alone do not reveal most of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.worker.loop import Run


LATER = 100
"""Offset in steps by which a rank's samples differ."""


def one_rank_left_out(run: Run) -> None:
    """Drop the last rank's gradients, and scale up the others' to keep their total size."""
    here = run.trained.accelerator
    last = here.process_index == here.num_processes - 1
    scale = 0.0 if last else here.num_processes / (here.num_processes - 1)
    backward = here.backward
    here.backward = lambda loss: backward(loss * scale)


def attention_of_own_tokens(run: Run) -> None:
    """Compute attention over this rank's tokens only."""
    from strategies.parallel.sequence.attention import Ulysses

    for layer in run.trained.subject.attentions(run.trained.module):
        layer.attend = layer.attend.inner if isinstance(layer.attend, Ulysses) else layer.attend


def positions_of_the_first_part(run: Run) -> None:
    """Give every rank's tokens the positions of the first rank's."""
    trained = run.trained
    trained.subject.take_part(trained.module, 0, trained.launch.layout.sequence)


def parts_not_joined(run: Run) -> None:
    """Use each rank's own part of the output for all parts."""
    from harness.worker import sampling

    def own_alone(trained: Any, part: Any, samples: Any, known: Any) -> Any:
        return part.repeat(1, 1, trained.launch.layout.sequence, 1)

    sampling.join = own_alone


def samples_of_their_own(run: Run) -> None:
    """Give ranks that should share samples parts of different samples."""
    layout, batches = run.trained.launch.layout, run.feed.micro_batches
    part = layout.part(run.trained.accelerator.process_index)
    run.feed.micro_batches = (  # type: ignore[method-assign]
        lambda step: batches(step + LATER * part)
    )


def gradients_not_averaged(run: Run) -> None:
    """Keep the gradients of each rank's own part."""
    run.trained.model.require_backward_grad_sync = False


def heads_dealt_as_they_lie(run: Run) -> None:
    """Split weights of several pieces (packed queries, keys and values) as they lie instead of
    piece by piece. The first rank gets all queries and half of the keys."""
    import torch
    from torch.distributed.tensor import distribute_tensor

    trained = run.trained
    packed = [p for p in trained.module.parameters() if getattr(p, "order", None)]
    with torch.no_grad():
        for p, whole in zip(packed, trained.engine.whole(trained, packed), strict=True):
            p.copy_(distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None))


def products_not_summed(run: Run) -> None:
    """Use each rank's partial product of a row-parallel layer without the sum."""
    for layer in _cut_layers(run, axis=1):
        layer._forward_hooks.clear()
        layer.register_forward_hook(lambda _, given, out: out.to_local())


def gradients_not_summed(run: Run) -> None:
    """Omit the gradient sum before a column-parallel layer."""
    import torch
    from torch.distributed.tensor import DTensor, Replicate

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            mine = grad.to_local()
            return DTensor.from_local(mine, grad.device_mesh, [Replicate()], run_check=False)

    for layer in _cut_layers(run, axis=0):
        layer.register_forward_pre_hook(lambda _, given: (Own.apply(given[0]), *given[1:]))


def _cut_layers(run: Run, axis: int) -> list[Any]:
    from torch import nn

    linears = (m for m in run.trained.module.modules() if isinstance(m, nn.Linear))
    return [m for m in linears if m.weight.placements[-1].is_shard(axis) and m.weight.ndim == 2
            and m.weight.device_mesh.ndim == 2]  # fmt: skip


def norm_of_own_parts(run: Run) -> None:
    """Clip gradients by the norm of this rank's own part."""
    import torch

    trained = run.trained
    limit = trained.settings.grad_clip or float("inf")

    def own() -> Any:
        grads = [p.grad.to_local() for p in trained.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        for grad in grads:
            grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        return norm

    trained.gradient_norm = own


RANKS: dict[str, Callable[[Run], None]] = {one_rank_left_out.__name__: one_rank_left_out}
"""Name -> change to a run of several replicas before its first step."""
SHARED: dict[str, Callable[[Run], None]] = {
    change.__name__: change
    for change in (
        attention_of_own_tokens,
        positions_of_the_first_part,
        samples_of_their_own,
        gradients_not_averaged,
    )
}
"""Name -> change to a run of ``ddp+sp`` before its first step."""
DRAWN: dict[str, Callable[[Run], None]] = {
    change.__name__: change
    for change in (attention_of_own_tokens, positions_of_the_first_part, parts_not_joined)
}
"""Name -> change to ranks of ``ddp+sp`` before they load samples."""
CUT: dict[str, Callable[[Run], None]] = {
    change.__name__: change
    for change in (
        heads_dealt_as_they_lie,
        products_not_summed,
        gradients_not_summed,
        norm_of_own_parts,
    )
}
"""Name -> change to a run of ``fsdp2+tp`` before its first step."""


# ---- pipeline stages ----
# None of these errors raises an exception.


def _once_there_is_a_schedule(run: Run, change: Callable[[Any], None]) -> None:
    """Apply ``change`` in the first step, when the schedule is built: only then are the shapes of
    the tensors between stages known."""
    pipe = run.trained.model.pipe
    begin = pipe.begin

    def begun(*given: Any) -> None:
        begin(*given)
        change(pipe)

    pipe.begin = begun


def gradients_not_divided_by_micro_batches(run: Run) -> None:
    """Sum gradients over the micro-batches of a step without dividing: Adam is insensitive to a
    scale."""
    _once_there_is_a_schedule(run, lambda pipe: setattr(pipe.schedule, "scale_grads", False))


def last_micro_batch_of_the_schedule_lost(run: Run) -> None:
    """Report the loss of the last micro-batch without its gradient."""

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
    """Give blocks after the first stage the condition of the previous micro-batch."""

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
    """Compute the gradient norm of one stage without the sum over stages."""
    from strategies.engine import Engine

    engine = run.trained.engine
    object.__setattr__(engine, "norm", functools.partial(Engine.norm, engine))  # frozen


def all_forward_before_any_backward(run: Run) -> None:
    """Replace 1f1b by gpipe, or by torch's equivalent for several runs of blocks. The numbers are
    the same, and memory is higher."""
    pipe = run.trained.model.pipe
    kind = "ScheduleLoopedBFS" if pipe.order.several else "ScheduleGPipe"
    pipe.order = dataclasses.replace(pipe.order, kind=kind)


def every_stage_keeps_the_whole_model(run: Run) -> None:
    """Keep weights of all blocks on each rank: the pipeline saves no memory."""
    import torch

    module = run.trained.module
    for name, p in run.trained.model.cut.elsewhere.items():
        weight = torch.nn.Parameter(torch.zeros(p.shape), requires_grad=False)
        module.register_parameter(name.replace(".", "_"), weight)


def runs_of_blocks_in_another_order(run: Run) -> None:
    """Reverse the order of a stage's blocks, so that its second run replaces its first."""
    blocks = run.trained.model.cut.blocks
    each = list(blocks.values())
    blocks.update(zip(blocks, each[::-1], strict=True))


def one_parameter_of_the_last_stage_not_stepped(run: Run) -> None:
    """Remove a parameter from the last stage's optimizer: no other rank can detect it."""
    if run.trained.model.cut.last:
        (group,) = run.trained.inner_optimizer.param_groups
        group["params"] = group["params"][:-1]


def weights_of_the_last_micro_batch_lost(run: Run) -> None:
    """Drop the weight gradients of the last micro-batch if they are computed separately. The
    gradients for the previous stage are complete."""

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
    """Step each pipeline with the gradients of its own samples."""
    ranks = run.trained.model.ranks
    object.__setattr__(ranks, "average", lambda gradients: None)  # the object is frozen


def gradients_of_what_all_stages_have_not_added_up(run: Run) -> None:
    """Step the layers before all blocks with the gradients of this stage's blocks only."""
    ranks = run.trained.model.ranks

    def alone(gradients: Any, micro: int) -> None:
        for gradient in gradients:
            gradient.div_(micro)

    object.__setattr__(ranks, "add_up", alone)  # the object is frozen


def blocks_of_others_without_what_was_received(run: Run) -> None:
    """Return zeros from the module that replaces the blocks before a stage's own."""
    way = run.trained.model.way
    own = way.own

    def without(number: int, received: Any, *given: Any) -> Any:
        return own(number, tuple(tensor * 0 for tensor in received), *given)

    way.own = without


def gradients_reduced_for_each_micro_batch(run: Run) -> None:
    """Reduce gradients for each micro-batch: the same numbers, and more communication."""
    module = run.trained.module
    sync = module.set_requires_gradient_sync
    module.set_requires_gradient_sync = lambda asked, **named: sync(True, **named)


def blocks_gathered_for_each_micro_batch(run: Run) -> None:
    """Free gathered weights after each backward: the same numbers, and more communication."""
    run.trained.model.reshard = True


def gradients_of_sharers_divided_twice(run: Run) -> None:
    """Divide gradients by the number of sharers again; torch's reduction returns a mean already."""
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
    """Reduce only the gradients of the last micro-batch."""
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
"""Name -> change to a run of ``pp`` before its first step that changes the numbers."""
SPLIT: dict[str, Callable[[Run], None]] = {
    weights_of_the_last_micro_batch_lost.__name__: weights_of_the_last_micro_batch_lost
}
"""The same for schedules that compute weight gradients separately."""
REPEATED: dict[str, Callable[[Run], None]] = {
    gradients_of_replicas_not_averaged.__name__: gradients_of_replicas_not_averaged
}
"""The same for several replicas of each stage."""
STANDING: dict[str, Callable[[Run], None]] = {
    change.__name__: change
    for change in (
        gradients_of_what_all_stages_have_not_added_up,
        blocks_of_others_without_what_was_received,
    )
}
"""The same for models that run their blocks in a forward pass of their own."""
SHARED_NUMBERS: dict[str, Callable[[Run], None]] = {
    change.__name__: change
    for change in (gradients_of_sharers_divided_twice, gradients_of_the_last_micro_batch_alone)
}
"""The same for ``pp_fsdp2``, in which ranks share a stage."""
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
"""All of them, and changes that violate the requested placement, order or communication."""
