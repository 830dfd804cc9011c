"""Gradients and DeepSpeed's buckets, in bytes, as one gradient after the other arrives. No torch.

Source: deepspeed 0.19, runtime/zero/stage_1_and_2.py (reduce_independent_p_g_buckets_and_remove_
grads, average_tensor, copy_grads_in_partition). Rank 0's view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.oracle.layers import Cut, Layer, by_rank, elements, parameters, stored
from tests.oracle.sizes import Sizes

__all__ = ["Arrival", "between", "bucket", "epilogue", "own", "walk"]


@dataclass(frozen=True)
class Arrival:
    """The instant at which ``layer``'s gradient is there, and bytes of gradients and buffers;
    ``behind``: its layer's backward is over."""

    layer: Layer
    held: float
    behind: bool = False


def own(s: Sizes) -> float:
    """Bytes of the buffer for reduced gradients: all parameters that rank 0's share touches."""
    cut = by_rank(parameters(s.layers), s.share)
    return s.weight * sum(one.size for one, ranks in cut.items() if 0 in ranks)


def bucket(s: Sizes) -> float:
    """Bytes of the buckets."""
    return s.weight * s.zero["reduce_bucket_size"] * s.buckets


def between(s: Sizes) -> float:
    """Bytes that wait for the next micro batch."""
    if not s.accumulates or s.stage == 3:
        return 0.0
    if s.stage < 2:
        return s.weight * s.trained + (bucket(s) if s.stage else 0)
    return 0.0 if s.offloads else own(s)


def walk(s: Sizes) -> Iterator[Arrival]:
    """Every gradient's arrival in the last micro batch. Where it overlaps, stage 1 puts each into
    a bucket as it comes, as stage 2 does; but for those that were accumulated before."""
    whole = s.stage == 0 or (s.stage == 1 and (s.accumulates or not s.overlaps))
    yield from _whole(s) if whole else _bucketed(s)


def _whole(s: Sizes) -> Iterator[Arrival]:
    """Gradients stay whole; accumulated ones are all there, beside the one that is added.
    Autocast's come in bfloat16 and are cast."""
    held = between(s) if s.accumulates else bucket(s) if s.stage else 0.0
    for layer in reversed(s.layers):
        held += 0 if s.accumulates else s.weight * layer.size
        new = s.weight * layer.weight if s.accumulates else 0
        yield Arrival(layer, held + new + (2 * layer.weight if s.copies else 0))


def _bucketed(s: Sizes) -> Iterator[Arrival]:
    """A gradient is copied into the bucket; before that a full one is reduced, and what is this
    rank's goes to a buffer of its own."""
    cut, filled, kept = by_rank(parameters(s.layers), s.share), [], 0.0
    standing = between(s) + (bucket(s) if s.stage < 3 else 0)
    for layer in reversed(s.layers):
        for one in _order(s, layer):
            # Both are computed together; a weight that is in the bucket is nowhere else.
            new = s.weight * (layer.weight if s.stage < 3 else one.weight)
            if elements(filled) + one.size > s.zero["reduce_bucket_size"]:
                yield Arrival(layer, standing + new + kept + _reducing(s, filled, cut), True)
                if s.stage < 3 and not s.offloads and any(0 in cut[x] for x in filled):
                    kept = own(s)
                filled = []
            filled.append(one)
            yield Arrival(layer, standing + new + kept)


def _order(s: Sizes, layer: Layer) -> list[Layer]:
    """The order in which autograd hands out a layer's gradients: torch's linear layer the bias
    first, ZeRO-3's own the weight."""
    both = parameters([layer])
    return both if s.stage == 3 else both[::-1]


def _reducing(s: Sizes, filled: Sequence[Layer], cut: Cut) -> float:
    """Bytes beside the bucket while it is reduced: stage 3 scatters a copy of all of it (gloo
    another), the stages before reduce to one rank after the other. An offloaded optimizer takes
    the norm of what is its own, in float64."""
    if s.stage == 3:
        largest = max(x.weight for x in filled) // s.ways
        norm = (8 + s.weight) * largest if s.offloads else 0
        copies = 2 if s.gloo else 1
        return max(copies * s.weight * elements(filled), s.weight * elements(filled) + norm)
    sums: dict[int, int] = {}
    for layer in filled:
        for rank, size in cut[layer].items():
            sums[rank] = sums.get(rank, 0) + size
    norm = 8 * max(cut[x].get(0, 0) for x in filled) if s.offloads else 0
    return max(s.weight * max(sums.values()), norm)


def epilogue(s: Sizes) -> float:
    """Bytes at the end of backward: stage 1 now reduces what it has whole, in stored order."""
    if s.stage != 1 or s.overlaps:
        return 0.0
    first: list[Layer] = []
    for layer in stored(parameters(s.layers)):
        if elements(first) + layer.size > s.zero["reduce_bucket_size"]:
            break
        first.append(layer)
    left = s.trained - elements(first)
    return s.weight * left + bucket(s) + own(s) + 4 * s.latents
