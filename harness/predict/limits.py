"""What no trace can follow, and why: a sentence for each part of a recipe at which one stops.

Looked up only after a trace has failed: where a library learns to do without storage, the trace
succeeds and its sentence here is never said. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from strategies.base import Strategy

__all__ = ["LIMITS", "why"]

HOOK = "its hook is called by DDP's reducer, which is C++ and wants real bytes"
COMPILED_STEP = "torchao compiles its step, which torch cannot do without storage"

LIMITS = {
    "adam4bit": COMPILED_STEP,
    "adam8bit:lib=torchao": COMPILED_STEP,
    "compress": HOOK,
    "onebit_adam": HOOK,
    "topk": HOOK,
    "offload_adamw": "torchao offloads from a CUDA device alone, and a prediction has none",
    "paged_adam8bit": "bitsandbytes takes pages from the CUDA driver, and a prediction has none",
    "qlora": "bitsandbytes packs weights into a tensor class of its own, which wants storage",
}
"""A part, by its name or its text -> why a training with it is not traced."""


def why(parts: Iterable[Strategy], raised: str) -> str:
    """The limits that ``parts`` meet, in a sentence; if none is known, the kind of exception."""
    met = [(part.name, LIMITS.get(str(part)) or LIMITS.get(part.name)) for part in parts]
    known = [f"{name} is not traced: {limit}" for name, limit in met if limit]
    return "; ".join(known) or f"a library failed on tensors without storage ({raised})"
