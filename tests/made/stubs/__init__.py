"""The ways in which the effect of each strategy could fail, by what is stubbed instead.

A file holds the stubs of one folder of ``strategies``, and its table ``LOST``: what happened
instead -> (recipe, strategy, the stage that is stubbed, the stub).
"""

from __future__ import annotations

from tests.made.stubs import (
    activations,
    adapters,
    distillation,
    losses,
    optimizers,
    precision,
    sampling,
    sparsity,
    step,
    streaming,
)
from tests.made.stubs.parts import Table

__all__ = ["LOST", "LOST_WHEN_DRAWN"]

LOST: Table = {
    case: stubbed
    for folder in (
        precision,
        activations,
        losses,
        distillation,
        optimizers,
        adapters,
        sparsity,
        step,
        streaming,
    )
    for case, stubbed in folder.LOST.items()
}
LOST_WHEN_DRAWN: Table = sampling.LOST
"""The same of a run that draws samples."""
