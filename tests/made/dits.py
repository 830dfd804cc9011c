"""DiTs on the CPU, whole and filled."""

from __future__ import annotations

from typing import Any

from harness.subjects.dit import model
from strategies import initial


def build(preset: str, *, seed: int, init: str = "adaln_zero", **sizes: Any) -> model.DiT:
    """Return a DiT with float32 weights that depend only on the arguments, those of ``make``."""
    draw = model.draws(seed, init)
    made = initial.skeleton(lambda: model.make(preset, **sizes), draw)
    initial.fill(made, draw, "cpu")
    return made
