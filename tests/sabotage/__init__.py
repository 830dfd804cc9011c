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

from tests.sabotage.ranks import CUT, DRAWN, RANKS, SHARED, STAGES, named

if TYPE_CHECKING:
    from harness.worker.loop import Run


# ---- FSDP2 shards ----
# None of these errors raises an exception. They change torch's parameter groups, because a hook on
# a sharded parameter would never be called.


def one_block_not_reduced(run: Run) -> None:
    """Leave one block's gradients unreduced: each rank keeps its own for the rows that it
    stores."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    class OwnRows(DefaultReduceScatter):
        def __call__(
            self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
        ) -> None:
            output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])

    block = run.trained.blocks()[1]
    block.set_custom_reduce_scatter(OwnRows())


def one_block_divided_twice(run: Run) -> None:
    """Divide one block's gradients by the number of ranks again: Adam is insensitive to a scale."""
    ranks = run.trained.launch.layout.sharers
    run.trained.blocks()[1].set_all_reduce_hook(lambda gradients: gradients.div_(ranks))


def groups_not_averaged(run: Run) -> None:
    """Step each sharding group with the gradients of its own samples."""
    import torch

    from strategies.engines.fsdp import shard

    alone, _ = torch.distributed.new_subgroups(1)
    for group in shard.groups(run.trained.module):
        group.mesh_info.replicate_process_group = alone


SHARDED = named(one_block_not_reduced, one_block_divided_twice)
"""Name -> change to a run of ``fsdp2`` before its first step."""
HYBRID = named(groups_not_averaged)
"""Name -> change to a run of ``hsdp`` before its first step."""
SHARDS = SHARDED | HYBRID


def _trained(run: Run) -> list[Any]:
    return [p for p in run.trained.module.parameters() if p.requires_grad]


def _on_gradients(run: Run, change: Callable[[Any], Any]) -> None:
    """Change each gradient when it is computed, before its norm is taken."""
    for p in _trained(run):
        p.register_hook(change)


def _at_the_step(run: Run, change: Callable[[list[Any]], object]) -> None:
    """Change gradients after their norm is taken, just before the optimizer's step."""
    optimizer = run.trained.optimizer
    step = optimizer.step

    def stepped(*given: Any, **named: Any) -> Any:
        if run.trained.accelerator.sync_gradients:
            change([p for p in _trained(run) if p.grad is not None])
        return step(*given, **named)

    optimizer.step = stepped


def rounded(run: Run) -> None:
    """Round each gradient to bfloat16 when it is computed."""
    _on_gradients(run, lambda gradient: gradient.bfloat16().float())


def doubled_behind_the_norm(run: Run) -> None:
    """Double gradients after their norm is logged: Adam is insensitive to a scale except by its
    epsilon."""
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
    accelerator, seen = run.trained.accelerator, [0]
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
    trained = run.trained
    predict = trained.subject.predict

    def rounded_first(model: Any, x: Any, t_B: Any, conditions: Any) -> Any:
        return predict(model, x, t_B.bfloat16().to(t_B.dtype), conditions)

    subject = copy.copy(trained.subject)
    object.__setattr__(subject, "predict", rounded_first)  # models are frozen
    trained.launch = dataclasses.replace(trained.launch, subject=subject)


def average_a_step_late(run: Run) -> None:
    """Omit the first step from the weight average."""
    for attachment in run.trained.attached.values():
        if attachment.averages():
            attachment.after_step = _from_the_second_on(attachment.after_step)


def _from_the_second_on(call: Callable[[], None]) -> Callable[[], None]:
    calls = itertools.count()
    return lambda: call() if next(calls) else None


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
ALL = SABOTAGES | RANKS | SHARED | DRAWN | CUT | SHARDS | STAGES
"""Name -> change, for the worker's hook (``harness.worker.measure.altered``)."""
