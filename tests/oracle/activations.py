"""What forward keeps for backward, in bytes: at the loss, and when a layer is at work. No torch."""

from __future__ import annotations

import math

from tests.oracle.layers import Layer, elements
from tests.oracle.sizes import ENTERED, FLOW_TAIL, Sizes

__all__ = ["arriving", "entering", "loss"]


def loss(s: Sizes) -> float:
    """Bytes at the loss's fullest instant: all that is kept, and the loss's own."""
    length = s.segment
    tail = s.widths.tail if s.resolved.subject.learn_sigma else FLOW_TAIL
    total = s.widths.head * s.tokens + tail * s.latents
    if length:
        return total + math.ceil(s.depth / length) * s.widths.stream * s.tokens
    return total + _blocks(s, s.depth) + _copies(s, None)


def entering(s: Sizes, layer: Layer, again: bool = False) -> float:
    """Bytes when forward enters ``layer``, or does so ``again`` to recompute it."""
    w, noisy = s.widths, 4 * s.latents
    if layer.block not in range(s.depth):
        behind = layer.block == s.depth
        return (loss(s) - w.tail * s.latents if behind else 0) + noisy
    inputs = (layer.block // s.segment + 1 if s.segment else 1) * w.stream * s.tokens
    whole = layer.block % s.segment * again if s.segment else layer.block
    own = ENTERED[layer.name] / 20 * w.kept * s.tokens
    return inputs + _blocks(s, whole) + own + _copies(s, layer) + noisy


def arriving(s: Sizes, layer: Layer, behind: bool = False) -> float:
    """Bytes when the gradient of ``layer`` is computed, or ``behind`` it."""
    w, block, noisy = s.widths, layer.block, 4 * s.latents
    if block < 0:
        return 2 * w.stream * s.tokens + noisy
    if block == s.depth:
        kept = 0.0 if s.segment else _blocks(s, s.depth)
        inputs = math.ceil(s.depth / s.segment) * w.stream if s.segment else 0
        return kept + (inputs + w.final) * s.tokens + _copies(s, layer) + noisy
    earlier = block // s.segment if s.segment else 0
    whole = block - earlier * s.segment
    inputs = (earlier + 1) * w.stream * s.tokens
    own = (w.behind if behind else w.open)[layer.name] * s.tokens + _small(s)
    return inputs + _blocks(s, whole) + own + _copies(s, layer) + noisy


def _blocks(s: Sizes, count: int) -> float:
    """What so many blocks keep."""
    return count * (s.widths.kept * s.tokens + _small(s))


def _small(s: Sizes) -> float:
    """A block's log-sum-exp of attention, two norms' statistics and modulation."""
    return 4 * s.scores + 16 * s.rows + s.widths.condition * s.conditions


def _copies(s: Sizes, layer: Layer | None) -> float:
    """Autocast's bfloat16 copies of the weights before ``layer``, all without one. Those that
    are made to recompute a segment are gone behind it."""
    if not s.copies:
        return 0.0
    used = list(s.layers)[: s.layers.index(layer) if layer else None]
    if s.segment and layer:
        first = layer.block // s.segment * s.segment
        used = [x for x in used if first <= x.block < s.depth]
    return 2.0 * elements(x for x in used if x.name != "labels")
