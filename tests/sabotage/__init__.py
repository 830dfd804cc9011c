"""Negative controls: deliberate errors that silently change a training, and that a test must see.

Each one changes a prepared run before its first step. A launched run gets it through the worker's
one hook, HEADROOM_ALTER, and is always void. The changes act on gradients where torch stores them,
so they are for replicas and for a single process.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.worker.loop import Run


def named(*changes: Callable[[Run], None]) -> dict[str, Callable[[Run], None]]:
    return {change.__name__: change for change in changes}


# ---- FSDP2 shards ----
# None of these errors raises an exception. They change torch's parameter groups, because a hook on
# a sharded parameter would never be called.


def one_block_not_reduced(run: Run) -> None:
    """Leave one block's gradients unreduced: each rank keeps its own for the rows it stores."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    class OwnRows(DefaultReduceScatter):
        def __call__(
            self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
        ) -> None:
            output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])

    block = run.blocks()[1]
    block.set_custom_reduce_scatter(OwnRows())


def one_block_divided_twice(run: Run) -> None:
    """Divide one block's gradients by the number of ranks again: Adam is insensitive to a scale."""
    ranks = run.launch.layout.sharers
    run.blocks()[1].set_all_reduce_hook(lambda gradients: gradients.div_(ranks))


def groups_not_averaged(run: Run) -> None:
    """Step each sharding group with the gradients of its own samples."""
    import torch

    from strategies.engines.fsdp import shard

    alone, _ = torch.distributed.new_subgroups(1)
    for group in shard.groups(run.module):
        group.mesh_info.replicate_process_group = alone


SHARDED = named(one_block_not_reduced, one_block_divided_twice)
"""Name -> change to a run of ``fsdp2`` before its first step."""
HYBRID = named(groups_not_averaged)
"""Name -> change to a run of ``hsdp`` before its first step."""
SHARDS = SHARDED | HYBRID


def _trained(run: Run) -> list[Any]:
    return [p for p in run.module.parameters() if p.requires_grad]


def _on_gradients(run: Run, change: Callable[[Any], Any]) -> None:
    """Change each gradient when it is computed, before its norm is taken."""
    for p in _trained(run):
        p.register_hook(change)


def _at_the_step(run: Run, change: Callable[[list[Any]], object]) -> None:
    """Change gradients after their norm is taken, just before the optimizer's step."""
    optimizer = run.optimizer
    step = optimizer.step

    def stepped(*given: Any, **named: Any) -> Any:
        if run.accelerator.sync_gradients:
            change([p for p in _trained(run) if p.grad is not None])
        return step(*given, **named)

    optimizer.step = stepped


def rounded(run: Run) -> None:
    """Round each gradient to bfloat16 when it is computed."""
    _on_gradients(run, lambda gradient: gradient.bfloat16().float())


def doubled_behind_the_norm(run: Run) -> None:
    """Double gradients after their norm is logged: only Adam's epsilon is sensitive to a scale."""
    _at_the_step(run, lambda parameters: [p.grad.mul_(2) for p in parameters])


def stale(run: Run) -> None:
    """Use the gradients of the previous step in each step."""
    last: dict[Any, Any] = {}

    def late(parameters: list[Any]) -> None:
        for p in parameters:
            now = p.grad.clone()
            p.grad.copy_(last.get(p, now))
            last[p] = now

    _at_the_step(run, late)


def one_parameter_not_stepped(run: Run) -> None:
    """Omit one parameter from every step."""
    parameters = _trained(run)
    chosen = parameters[len(parameters) // 2]
    _at_the_step(run, lambda _: setattr(chosen, "grad", None))


def one_micro_batch_dropped(run: Run) -> None:
    """Drop the gradients of every second micro-batch."""
    accelerator, seen = run.accelerator, [0]
    backward = accelerator.backward

    def every_second(loss: Any) -> None:
        seen[0] += 1
        backward(loss * (seen[0] % 2))

    accelerator.backward = every_second


def other_labels_dropped(run: Run) -> None:
    """Withhold the labels of different samples than the random ones."""
    batches = run.feed.micro_batches

    def kept(step: int) -> Any:
        for batch in batches(step):
            drop = batch.conditions["drop"].roll(1)
            yield dataclasses.replace(batch, conditions={**batch.conditions, "drop": drop})

    run.feed.micro_batches = kept  # type: ignore[method-assign]


def timesteps_rounded(run: Run) -> None:
    """Round the model's timesteps to bfloat16: 842 becomes 844."""
    predict = run.subject.predict

    def rounded_first(model: Any, x: Any, t_B: Any, conditions: Any) -> Any:
        return predict(model, x, t_B.bfloat16().to(t_B.dtype), conditions)

    subject = copy.copy(run.subject)
    object.__setattr__(subject, "predict", rounded_first)  # models are frozen
    run.launch = dataclasses.replace(run.launch, subject=subject)


def average_a_step_late(run: Run) -> None:
    """Omit the first step from the weight average."""
    for attachment in run.attached.values():
        if attachment.averages():
            attachment.after_step = _from_the_second_on(attachment.after_step)


def _from_the_second_on(call: Callable[[], None]) -> Callable[[], None]:
    calls = itertools.count()
    return lambda: call() if next(calls) else None


# ---- several ranks: losses alone do not reveal most of these ----

LATER = 100
"""Offset in steps by which a rank's samples differ."""


def one_rank_left_out(run: Run) -> None:
    """Drop the last rank's gradients, and scale up the others' to keep their total size."""
    here = run.accelerator
    last = here.process_index == here.num_processes - 1
    scale = 0.0 if last else here.num_processes / (here.num_processes - 1)
    backward = here.backward
    here.backward = lambda loss: backward(loss * scale)


def attention_of_own_tokens(run: Run) -> None:
    """Compute attention over this rank's tokens only."""
    from strategies.parallel.sequence.attention import Ulysses
    from strategies.subject import attentions

    for layer in attentions(run.module):
        layer.attend = layer.attend.inner if isinstance(layer.attend, Ulysses) else layer.attend


def positions_of_the_first_part(run: Run) -> None:
    """Give every rank's tokens the positions of the first rank's."""
    run.subject.take_part(run.module, 0, run.launch.layout.sequence)


def samples_of_their_own(run: Run) -> None:
    """Give ranks that should share samples parts of different samples."""
    layout, batches = run.launch.layout, run.feed.micro_batches
    part = layout.part(run.accelerator.process_index)
    run.feed.micro_batches = (  # type: ignore[method-assign]
        lambda step: batches(step + LATER * part)
    )


def gradients_not_averaged(run: Run) -> None:
    """Keep the gradients of each rank's own part."""
    run.model.require_backward_grad_sync = False


def heads_dealt_as_they_lie(run: Run) -> None:
    """Split packed queries, keys and values as they lie instead of piece by piece."""
    import torch
    from torch.distributed.tensor import distribute_tensor

    packed = [p for p in run.module.parameters() if getattr(p, "order", None)]
    with torch.no_grad():
        for p, whole in zip(packed, run.engine.whole(run, packed), strict=True):
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

    linears = (m for m in run.module.modules() if isinstance(m, nn.Linear))
    return [m for m in linears if m.weight.placements[-1].is_shard(axis) and m.weight.ndim == 2
            and m.weight.device_mesh.ndim == 2]  # fmt: skip


RANKS = named(one_rank_left_out)
"""Name -> change to a run of several replicas before its first step."""
SHARED = named(
    attention_of_own_tokens,
    positions_of_the_first_part,
    samples_of_their_own,
    gradients_not_averaged,
)
"""Name -> change to a run of ``ddp+sp`` before its first step."""
CUT = named(heads_dealt_as_they_lie, products_not_summed, gradients_not_summed)
"""Name -> change to a run of ``fsdp2+tp`` before its first step."""


# ---- pipeline stages ----
# None of these errors raises an exception.


def gradients_not_divided_by_micro_batches(run: Run) -> None:
    """Sum gradients over micro-batches without dividing: Adam is insensitive to a scale."""
    model = run.model
    begin = model._begin

    def begun(*given: Any) -> None:
        begin(*given)
        model.schedule.scale_grads = False

    model._begin = begun


def all_forward_before_any_backward(run: Run) -> None:
    """Replace 1f1b by gpipe: the numbers are the same, and memory is higher."""
    model = run.model
    begin = model._begin

    def begun(order: Any) -> None:
        kind = "ScheduleLoopedBFS" if order.runs > 1 else "ScheduleGPipe"
        begin(dataclasses.replace(order, kind=kind))

    model._begin = begun


def every_stage_keeps_the_whole_model(run: Run) -> None:
    """Keep weights of all blocks on each rank: the pipeline saves no memory."""
    import torch

    module = run.module
    for name, p in run.model.cut.elsewhere.items():
        weight = torch.nn.Parameter(torch.zeros(p.shape), requires_grad=False)
        module.register_parameter(name.replace(".", "_"), weight)


def one_parameter_of_the_last_stage_not_stepped(run: Run) -> None:
    """Remove a parameter from the last stage's optimizer: no other rank can detect it."""
    if run.model.cut.last:
        (group,) = run.inner_optimizer.param_groups
        group["params"] = group["params"][:-1]


def gradients_of_replicas_not_averaged(run: Run) -> None:
    """Step each pipeline with the gradients of its own samples."""
    ranks = run.model.ranks
    object.__setattr__(ranks, "average", lambda gradients: None)  # the object is frozen


STAGES = named(
    gradients_not_divided_by_micro_batches,
    gradients_of_replicas_not_averaged,
    all_forward_before_any_backward,
    every_stage_keeps_the_whole_model,
    one_parameter_of_the_last_stage_not_stepped,
)
"""Name -> change to a run of ``pp`` before its first step."""


# ---- all ----

SABOTAGES = named(
    rounded,
    doubled_behind_the_norm,
    stale,
    one_parameter_not_stepped,
    one_micro_batch_dropped,
    other_labels_dropped,
    timesteps_rounded,
    average_a_step_late,
)
"""Name -> change to a run before its first step."""
ALL = SABOTAGES | RANKS | SHARED | CUT | SHARDS | STAGES
"""Name -> change, for the worker's hook (``harness.worker.measure.altered``)."""
