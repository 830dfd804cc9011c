"""Muon's update of a matrix, as a training step made it."""

from __future__ import annotations

from typing import Any

from strategies.base import Settings, demand
from strategies.evidence.updates import Update, relative_error

__all__ = ["orthogonal"]

SCALE = 0.2
"""Of match_rms_adamw: an orthogonal matrix is scaled to the size of AdamW's update."""
NEAR_ONE = (0.5, 1.5)
LIFTED, MOST = 0.01, 0.9
"""Newton and Schulz's iteration takes singular values to between 0.5 and 1.5: in five rounds all
those above a hundredth of the matrix's norm, for it multiplies small ones by 3.4 a round."""


def orthogonal(update: Update, settings: Settings, momentum: float) -> dict[str, Any]:
    """The update of a matrix as the step made it: its momentum by Muon's rule, and its singular
    values near one in every direction that the momentum has."""
    was, now = update
    kept = was["momentum_buffer"].double().lerp(was["grad"].double(), 1 - momentum)
    off = relative_error(now["momentum_buffer"], kept)
    demand(off <= 0.01, f"the momentum is {off:.2g} of itself away from Muon's rule")
    size = settings.learning_rate * SCALE * max(kept.shape) ** 0.5
    weight = (1 - settings.learning_rate * settings.weight_decay) * was["weight"].double()
    # What is made orthogonal is Nesterov's: the momentum once more, towards which it goes.
    given = spectrum(was["grad"].double().lerp(kept, momentum))
    found = spectrum((weight - now["weight"].double()) / size)
    directions = int((given >= LIFTED * given.norm()).sum())
    near = int(((found >= NEAR_ONE[0]) & (found <= NEAR_ONE[1])).sum())
    demand(
        near >= MOST * directions and directions > 1,
        f"{near} singular values of an update are near one, of {directions} directions",
    )
    return {
        "update_directions": directions,
        "singular_values_near_one": near,
        "momentum_error": float(f"{off:.2g}"),
    }


def spectrum(matrix: Any) -> Any:
    """Singular values, the largest first."""
    import torch

    return torch.linalg.svdvals(matrix)
