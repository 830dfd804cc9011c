"""What memory is for: the one list of categories, and the fewer in which a measured run tells it.

No torch: predictions, measured steps and reports name the same things by the same words.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["CATEGORIES", "INFERENCE", "MEASURED", "measured", "measured_name"]

CATEGORIES = {
    "parameters": "weights as this rank stores them (its share, and low-precision copies)",
    "gathered": "weights of other ranks, gathered for the blocks at work",
    "gradients": "gradients, whole or this rank's share",
    "optimizer_state": "moments, and the float32 master weights of an engine that keeps them",
    "ema": "the averaged weights, and what else strategies keep beside the model",
    "activations": "kept by forward for backward",
    "recomputed": "activations computed again in backward",
    "autocast": "low-precision copies of float32 weights",
    "buckets": "communication buckets",
    "temporaries": "everything else: intermediate results, the optimizer's, kernel scratch",
}
"""Category -> what it holds."""

MEASURED = {
    "parameters": ("parameters", "gathered"),
    "gradients": ("gradients",),
    "optimizer_state": ("optimizer_state",),
    "ema": ("ema",),
    "activations": ("activations", "autocast"),
    "workspace": ("temporaries", "recomputed"),
}
"""Field of ``harness.result.Categories`` -> what it sums. Buckets count where their engine says:
as gradients on their way to their owners, or as workspace beside the gradients."""
INFERENCE = ("parameters", "activations", "workspace")
"""What a process that only infers holds."""
_NAMES = {fine: name for name, parts in MEASURED.items() for fine in parts}


def measured_name(category: str, buckets: str) -> str:
    """The field of a measured run in which ``category`` counts."""
    return buckets if category == "buckets" else _NAMES[category]


def measured(sums: Mapping[str, int], buckets: str) -> dict[str, int]:
    """Bytes by category as a measured run has them; ``buckets`` is the engine's word."""
    totals = dict.fromkeys(MEASURED, 0)
    for category, size in sums.items():
        totals[measured_name(category, buckets)] += size
    return totals
