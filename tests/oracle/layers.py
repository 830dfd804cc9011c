"""The layers of a DiT that take gradients, by size: what the closed form walks over. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from harness.resolve import Resolved
from harness.subjects.dit.presets import FREQUENCIES

__all__ = ["Cut", "Layer", "by_rank", "elements", "layers", "parameters", "stored"]


Cut = dict["Layer", dict[int, int]]
"""Layer -> rank -> elements of it in that rank's share."""


@dataclass(frozen=True)
class Layer:
    """A layer's elements. ``block``: of the blocks, -1 before them, the depth behind them."""

    name: str
    block: int
    weight: int
    bias: int

    @property
    def size(self) -> int:
        """Elements of both."""
        return self.weight + self.bias


def layers(resolved: Resolved) -> list[Layer]:
    """In the order in which forward first needs them; gradients come in the opposite order."""
    shape, facts = resolved.subject.shape, resolved.subject.data
    d, m, patch = shape.hidden_size, shape.mlp_size, facts.channels * shape.patch_size**2
    outputs = patch * (1 + resolved.subject.learn_sigma)
    found = [
        Layer("patches", -1, patch * d, d),
        Layer("time0", -1, FREQUENCIES * d, d),
        Layer("time2", -1, d * d, d),
        Layer("labels", -1, (facts.classes + (resolved.spec.class_dropout > 0)) * d, 0),
    ]
    for i in range(shape.depth):
        found += [
            Layer("adaLN", i, 6 * d * d, 6 * d),
            Layer("qkv", i, 3 * d * d, 3 * d),
            Layer("proj", i, d * d, d),
            Layer("fc1", i, d * m, m),
            Layer("fc2", i, m * d, d),
        ]
    end = shape.depth
    return [
        *found,
        Layer("adaLN", end, 2 * d * d, 2 * d),
        Layer("linear", end, outputs * d, outputs),
    ]


def stored(found: Sequence[Layer]) -> list[Layer]:
    """The same layers in the order of ``module.parameters()``, in which ZeRO cuts its shares.

    A block holds its modulation last, and the final layer too.
    """
    return sorted(found, key=lambda layer: (layer.block, layer.name == "adaLN"))


def parameters(found: Iterable[Layer]) -> list[Layer]:
    """Weights and biases apart, each as a layer that has no other, in the same order."""
    both = [(replace(x, bias=0), replace(x, weight=0)) for x in found]
    return [one for pair in both for one in pair if one.size]


def elements(found: Iterable[Layer]) -> int:
    """Elements of all of them."""
    return sum(layer.size for layer in found)


def by_rank(found: Sequence[Layer], share: int) -> Cut:
    """What each rank owns of each layer; shares follow ``stored``."""
    at, cut = 0, {}
    for layer in stored(found):
        ranks = range(at // share, (at + layer.size - 1) // share + 1)
        cut[layer] = {
            rank: min(at + layer.size, (rank + 1) * share) - max(at, rank * share) for rank in ranks
        }
        at += layer.size
    return cut
