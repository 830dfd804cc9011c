"""Names and rank of the LoRA matrices in a file of adapters. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from strategies.base import BadInput
from strategies.words import RUN

ENDS = (".lora_A.default.weight", ".lora_B.default.weight")
"""Endings of an adapter's matrix names after its layer's name: peft's."""


def named(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return layer -> the names of its two matrices, for layers that have both among ``names``."""
    known = set(names)
    layers = sorted(n.removesuffix(ENDS[0]) for n in known if n.endswith(ENDS[0]))
    found = {layer: (layer + ENDS[0], layer + ENDS[1]) for layer in layers}
    return {layer: ends for layer, ends in found.items() if known.issuperset(ends)}


def rank_of(file: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the rank of all adapters in ``file``.

    Raises:
        BadInput: it holds other tensors, or several ranks.
    """
    layers = named(shapes)
    odd = sorted(shapes.keys() - {end for ends in layers.values() for end in ends})
    if odd or not layers:
        what = f"{odd[0]}, which is no matrix of LoRA's" if odd else "nothing"
        raise BadInput(
            f"{file} holds {what}; give what {RUN} train left of lora or qlora, or merge it "
            "yourself and give all weights by --weights"
        )
    ranks = {rank for a, b in layers.values() for rank in (shapes[a][0], shapes[b][1])}
    if len(ranks) > 1:
        raise BadInput(f"{file} has adapters of ranks {sorted(ranks)}; merge them yourself")
    return ranks.pop()
