"""Negative controls of several ranks: ways in which what each of them does can fail to be one
training, done on purpose as in ``harness.worker.sabotage``. Losses alone forgive most of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.worker.loop import Run

__all__ = ["RANKS", "SHARED"]


def one_rank_left_out(run: Run) -> None:
    """The last rank adds nothing to the gradients, the others as much more: their size stays."""
    here = run.trained.accelerator
    last = here.process_index == here.num_processes - 1
    scale = 0.0 if last else here.num_processes / (here.num_processes - 1)
    for p in run.trained.module.parameters():
        if p.requires_grad:
            p.register_hook(lambda gradient: gradient * scale)


def attention_of_own_tokens(run: Run) -> None:
    """Attention sees the tokens of this rank's part alone."""
    from strategies.parallel import attending

    attending.keep_to_own(run.trained.module, run.trained.subject)


def positions_of_the_first_part(run: Run) -> None:
    """Every rank's tokens have the positions of the first rank's."""
    trained = run.trained
    trained.subject.take_part(trained.module, 0, trained.launch.layout.sequence)


def gradients_not_averaged(run: Run) -> None:
    """Each rank keeps the gradients of its own part."""
    run.trained.model.require_backward_grad_sync = False


RANKS: dict[str, Callable[[Run], None]] = {one_rank_left_out.__name__: one_rank_left_out}
"""Name -> what is done to a run of several replicas before its first step."""
SHARED: dict[str, Callable[[Run], None]] = {
    change.__name__: change
    for change in (attention_of_own_tokens, positions_of_the_first_part, gradients_not_averaged)
}
"""Name -> what is done to a run of ``ddp+sp`` before its first step."""
