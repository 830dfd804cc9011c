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
    name: str,
    p: Tensor,
    *,
    awake: bool = False,
    generator: torch.Generator | None = None,
    frames: int = 1,
) -> None:
    """Fill the parameter ``name`` as the reference does, in place; ``awake``: its zeros too.

    Args:
        generator: what draws; None for torch's own.
        frames: of the videos whose model it is.
    """
    if name == "pos_embed":
        table = sincos_table(p.shape[-1], math.isqrt(p.shape[1] // frames), frames)
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


def draws(seed: int, init: str, frames: int = 1) -> Draw:
    """Each first weight of a DiT from ``seed`` and its name: see ``Subject.draws``.

    Args:
        init: "adaln_zero", the reference's, or "awake", which fills its zeros.
        frames: of the videos whose model it is.

    Raises:
        ValueError: an unknown init.
    """
    if init not in INITS:
        raise ValueError(f"unknown init {init!r}; one of {', '.join(INITS)}")

    def draw(name: str, like: Tensor) -> Tensor:
        values = torch.empty(like.shape, device="cpu")
        generator = initial.keyed(seed, name)
        start(name, values, awake=init == "awake", generator=generator, frames=frames)
        return values

    return draw


def sincos_table(hidden_size: int, grid: int, frames: int = 1) -> np.ndarray:
    """Position embedding float64 [frames * grid * grid, D]: sines and cosines of the column, then
    the row.

    Column first as in MAE (arXiv:2111.06377), whose table the reference took. Of a video the first
    quarter of the width tells the frame and the rest column and row, as in CogVideoX
    (arXiv:2408.06072; diffusers' ``get_3d_sincos_pos_embed``). An image has no use for that
    quarter: its table is no video's of one frame.
    """
    time = hidden_size // 4 if frames > 1 else 0
    rows, columns = np.divmod(np.arange(grid * grid), grid)
    of_place = _waves((columns, rows), hidden_size - time)
    if not time:
        return of_place
    of_frame = _waves((np.arange(frames),), time)
    return np.hstack([of_frame.repeat(grid * grid, axis=0), np.tile(of_place, (frames, 1))])


def _waves(places: tuple[np.ndarray, ...], width: int) -> np.ndarray:
    """[T, width]: of each coordinate [T] its sines, then its cosines, a share of the width each."""
    count = width // (2 * len(places))
    omega = 10000.0 ** -(np.arange(count) / count)
    angles = [np.outer(place, omega) for place in places]
    return np.concatenate([f(a) for a in angles for f in (np.sin, np.cos)], axis=1)
