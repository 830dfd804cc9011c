"""Negative controls of several ranks: ways in which what each of them does can fail to be one
training, done on purpose as in ``harness.worker.sabotage``. Losses alone forgive most of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.worker.loop import Run

__all__ = ["BETWEEN", "CUT", "DRAWN", "RANKS", "SHARED"]

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
    from harness.worker.drawing import batch

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
