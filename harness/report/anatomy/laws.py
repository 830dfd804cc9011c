"""How a DiT's activation memory and FLOPs grow with its size, fitted to measured points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.memory.portrait import OpCost, Point
from harness.subjects.dit.presets import PRESETS, train_flops, trainable_count

__all__ = ["Law", "attainable", "fit", "preset_errors", "six_nd_error"]


@dataclass(frozen=True)
class Law:
    """Activation bytes = B (block T D L + ends T D + sample D L), for batch B, tokens T, hidden
    units D and blocks L.

    ``block``: bytes a token, hidden unit and block; ``ends``: bytes a token and hidden unit
    outside the blocks; ``sample``: bytes a sample, hidden unit and block (the modulation).
    ``worst`` is the largest relative error over the points it was fitted to.
    """

    block: float
    ends: float
    sample: float
    worst: float = 0.0

    def __call__(self, batch: int, tokens: int, hidden: int, depth: int) -> float:
        """Bytes of a step's activations."""
        unit_bytes = self.block * tokens * depth + self.ends * tokens + self.sample * depth
        return batch * hidden * unit_bytes


def fit(points: Sequence[Point]) -> Law:
    """Least squares of relative errors, so that small models count as much as large ones.

    Raises:
        ValueError: fewer than four points, or points that do not tell the terms apart.
    """
    rows = np.array([_terms(p) for p in points], dtype=float)
    sizes = np.array([p.activation_bytes for p in points], dtype=float)
    if len(points) < 4 or np.linalg.matrix_rank(rows / sizes[:, None]) < 3:
        raise ValueError(f"{len(points)} points do not tell the law's three terms apart")
    factors, *_ = np.linalg.lstsq(rows / sizes[:, None], np.ones(len(points)), rcond=None)
    errors = np.abs(rows @ factors / sizes - 1)
    return Law(*(float(factor) for factor in factors), worst=float(errors.max()))


def _terms(p: Point) -> tuple[int, int, int]:
    width = p.batch * p.hidden
    return width * p.tokens * p.depth, width * p.tokens, width * p.depth


def six_nd_error(parameters: int, tokens: int, flops: float) -> float:
    """How far 6 N D is from the counted FLOPs of a training step, relative: + is too many.

    N trainable parameters, D tokens of the whole batch (Kaplan et al. 2020, arXiv:2001.08361). A
    DiT's adaLN weights, a third of a block, run once a sample and not once a token; attention's
    products of activations, which 6 N D leaves out, win some of it back at many tokens.
    """
    return 6 * parameters * tokens / flops - 1


def preset_errors(input_size: int = 32) -> list[tuple[str, int, float]]:
    """(preset, tokens, error of 6 N D) of every preset, from the closed form of its FLOPs."""
    errors = []
    for name, shape in PRESETS.items():
        tokens, flops = shape.tokens(input_size), train_flops(shape, input_size)
        error = six_nd_error(trainable_count(shape, input_size), tokens, flops)
        errors.append((name, tokens, error))
    return errors


def attainable(flops_a_byte: float, peak_flops: float, bandwidth: float) -> float:
    """FLOP/s under the roofline (Williams et al. 2009): what memory feeds, up to the peak."""
    return min(peak_flops, flops_a_byte * bandwidth)


def intensity(cost: OpCost) -> float:
    """FLOPs a byte moved."""
    return cost.flops / cost.bytes if cost.bytes else 0.0
