"""Samples as a picture. Shape suffixes: B batch, C channels, H height, W width, R grid rows."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

__all__ = ["write_grid"]

SIDE = 96
"""Pixels a sample is widened to at least."""
GAP = 4
FRAME = 96
"""Grey of the gaps: black ones would run into a digit's own background."""


def write_grid(x_BCHW: Tensor, path: str | Path, columns: int, *, grey: bool = True) -> None:
    """Write samples as one PNG, left to right, top to bottom; an existing file is replaced whole.

    Args:
        grey: True shows the mean over channels, -1 black and 1 white (digits). False shows the
            first three channels as colours, each stretched to its own range over all samples
            (latents, which no decoder has turned into pictures).

    Raises:
        ValueError: no samples, fewer than one column, or values that are not finite.
    """
    x = x_BCHW.detach().float().cpu().numpy()
    if x.ndim != 4 or x.size == 0 or columns < 1:
        raise ValueError(f"cannot lay out {list(x.shape)} in {columns} columns")
    if not np.isfinite(x).all():
        raise ValueError("samples are not finite; the model has diverged")
    pixels = _grey(x) if grey else _colours(x)
    _write(Image.fromarray(_tile(pixels, columns)), Path(path))


def _grey(x: np.ndarray) -> np.ndarray:
    """[B, C, H, W] in [-1, 1] -> uint8 [B, H, W]."""
    return _bytes((x.mean(axis=1) + 1) / 2)


def _colours(x: np.ndarray) -> np.ndarray:
    """[B, C, H, W] -> uint8 [B, H, W, 3]; two channels or one are repeated to three."""
    shown = x[:, [min(c, x.shape[1] - 1) for c in range(3)]]
    low, high = (f(shown, axis=(0, 2, 3), keepdims=True) for f in (np.min, np.max))
    return _bytes((shown - low) / np.maximum(high - low, 1e-12)).transpose(0, 2, 3, 1)


def _bytes(unit: np.ndarray) -> np.ndarray:
    return (np.clip(unit, 0, 1) * 255 + 0.5).astype(np.uint8)


def _tile(pixels: np.ndarray, columns: int) -> np.ndarray:
    """uint8 [B, H, W, ...] -> one picture, each sample widened by whole pixels, gaps between."""
    times = max(1, -(-SIDE // pixels.shape[1]))
    pixels = pixels.repeat(times, axis=1).repeat(times, axis=2)
    edges = [(0, GAP), (0, GAP)] + [(0, 0)] * (pixels.ndim - 3)
    empty = -len(pixels) % columns
    pixels = np.pad(pixels, [(0, empty), *edges], constant_values=FRAME)
    rows = pixels.reshape(-1, columns, *pixels.shape[1:])
    joined = np.concatenate(np.concatenate(list(rows), axis=1), axis=1)
    return joined[:-GAP, :-GAP]


def _write(picture: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".png")
    try:
        with os.fdopen(handle, "wb") as file:
            picture.save(file, format="PNG")
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
