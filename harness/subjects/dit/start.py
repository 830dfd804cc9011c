"""The first weights of a DiT, each by its name alone. Imports torch: import it where torch is."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from strategies import initial
from strategies.initial import Draw

__all__ = ["AWAKE_STD", "INITS", "draws", "sincos_table", "start"]

AWAKE_STD = 0.02
INITS = ("adaln_zero", "awake")
ZERO = ("adaLN_modulation", "final_layer.linear")
"""What adaLN-Zero starts at zero. At zero every block is the identity and the output is constant,
so the first optimizer steps leave almost all weights without a gradient: two strategies would agree
in loss whatever they did to the blocks. "awake" fills it with N(0, 0.02)."""
NARROW = ("t_embedder", "y_embedder", "x_embedder.table")


@torch.no_grad()
def start(
    name: str, p: Tensor, *, awake: bool = False, generator: torch.Generator | None = None
) -> None:
    """Fill the parameter ``name`` as the reference does, in place; ``awake``: its zeros too.

    Args:
        generator: what draws; None for torch's own.
    """
    if name == "pos_embed":
        table = sincos_table(p.shape[-1], math.isqrt(p.shape[1]))
        p.copy_(torch.from_numpy(table))
    elif any(word in name for word in ZERO):
        nn.init.normal_(p, std=AWAKE_STD, generator=generator) if awake else nn.init.zeros_(p)
    elif name.endswith("bias"):
        nn.init.zeros_(p)
    elif name.startswith(NARROW):
        nn.init.normal_(p, std=0.02, generator=generator)
    else:
        # A patch embedding is a linear layer in a convolution's clothes.
        nn.init.xavier_uniform_(p.view(len(p), -1), generator=generator)


def draws(seed: int, init: str) -> Draw:
    """Each first weight of a DiT from ``seed`` and its name: see ``Subject.draws``.

    Args:
        init: "adaln_zero", the reference's, or "awake", which fills its zeros.

    Raises:
        ValueError: an unknown init.
    """
    if init not in INITS:
        raise ValueError(f"unknown init {init!r}; one of {', '.join(INITS)}")

    def draw(name: str, like: Tensor) -> Tensor:
        values = torch.empty(like.shape, device="cpu")
        start(name, values, awake=init == "awake", generator=initial.keyed(seed, name))
        return values

    return draw


def sincos_table(hidden_size: int, grid: int) -> np.ndarray:
    """Position embedding float64 [grid * grid, D]: sines and cosines of the column, then the row.

    Column first as in MAE (arXiv:2111.06377), whose table the reference took.
    """
    quarter = hidden_size // 4
    omega = 10000.0 ** -(np.arange(quarter) / quarter)
    rows, columns = np.divmod(np.arange(grid * grid), grid)
    angles = [np.outer(place, omega) for place in (columns, rows)]
    return np.concatenate([f(a) for a in angles for f in (np.sin, np.cos)], axis=1)
