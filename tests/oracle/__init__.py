"""Peak memory of a DiT by formula: what the trace, which shares no code with it, is held to.

Some instants of a step are known to be full: the loss, each layer's entry and each gradient's
arrival, the end of backward and the optimizer. For each of them the bytes are added up: what stands
all the time (``states``), what forward keeps, counted from ``harness.subjects.dit.model.Block``
tensor by tensor (``activations``), gradients and DeepSpeed's buckets in the order in which they
fill (``gradients``) and what ZeRO-3 gathers (``gathering``). The highest sum is the peak. A part of
a recipe that no formula knows is named, and there is no number. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.resolve import Resolved
from strategies.strategy import Strategy
from tests.oracle import activations, gathering, gradients, states
from tests.oracle.sizes import Sizes, sizes

__all__ = ["peak_bytes", "unknown_parts"]

SHARDING = {"single", "ddp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"}
KNOWN = SHARDING | {"fp32", "tf32", "bf16", "checkpoint", "adamw", "accumulate", "ema"}


def peak_bytes(resolved: Resolved) -> int | None:
    """Bytes of the fullest instant of a step on one rank; None for parts it does not know."""
    if unknown_parts(resolved):
        return None
    s = sizes(resolved)
    return int(states.standing(s) + max(_instants(s)))


def _instants(s: Sizes) -> Iterator[float]:
    """Bytes beside what stands all the time, instant by instant."""
    gathered, waiting = gathering.gathered(s), gradients.between(s)
    yield states.stepping(s)
    yield gradients.epilogue(s)
    yield activations.loss(s) + waiting + gathered.loss
    for layer, weights in gathered.forward.items():
        yield activations.entering(s, layer) + waiting + weights
    for layer, weights in gathered.again.items():
        yield activations.entering(s, layer, again=True) + weights
    for arrival in gradients.walk(s):
        weights = gathered.backward.get(arrival.layer, 0.0)
        yield activations.arriving(s, arrival.layer, arrival.behind) + arrival.held + weights


def unknown_parts(resolved: Resolved) -> list[str]:
    """Parts of the recipe, and data, whose effect on memory no formula here holds."""
    lost = [str(p) for p in resolved.recipe.strategies if p.name not in KNOWN or _differs(p)]
    data = resolved.spec.data
    return lost + ([f"data {data}"] if data.startswith("vae") else [])


def _differs(part: Strategy) -> bool:
    """Whether a part that is known is used in a way that is not."""
    return getattr(part, "keep", "segments") != "segments"
