"""Negative controls for ranks that share samples: ways in which their parts can fail to be one
training, done on purpose as in ``harness.worker.sabotage``. Losses alone forgive most of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.worker.loop import Run

__all__ = ["SHARED"]


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


SHARED: dict[str, Callable[[Run], None]] = {
    change.__name__: change
    for change in (attention_of_own_tokens, positions_of_the_first_part, gradients_not_averaged)
}
"""Name -> what is done to a run of ``ddp+sp`` before its first step."""
