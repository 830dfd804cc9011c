"""What no trace can follow, and why: a sentence for each part of a recipe at which one stops.

Looked up only after a trace has failed: once a library can do without storage, the trace succeeds
and its sentence here is not used. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from strategies.strategy import Strategy

__all__ = ["LIMITS", "NoTrace", "why"]

HOOK = "{name} hooks into DDP's reducer, which is C++ and wants real bytes"
COMPILED = "torchao compiles the step of {name}, which torch cannot do without storage"

LIMITS = {
    "adam4bit": COMPILED,
    "adam8bit:lib=torchao": COMPILED,
    "compress": HOOK,
    "onebit_adam": HOOK,
    "topk": HOOK,
    "paged_adam8bit": "{name} takes pages from the CUDA driver, and a prediction has none",
}
"""A part, by its name or its text -> why a training with ``{name}`` is not traced."""


class NoTrace(RuntimeError):
    """A trace that would be wrong; the message says to a person why."""


def why(parts: Iterable[Strategy], raised: str) -> str:
    """The limits that ``parts`` meet, in a sentence; if none is known, the kind of exception."""
    met = [(part.name, LIMITS.get(str(part)) or LIMITS.get(part.name)) for part in parts]
    known = [limit.format(name=name) for name, limit in met if limit]
    return "; ".join(known) or f"a library failed on tensors without storage ({raised})"
