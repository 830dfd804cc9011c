"""The categories of memory that a step's trace tells apart, and how a report names them."""

from __future__ import annotations

from harness.memory.categories import MEASURED as CATEGORIES

__all__ = ["CATEGORIES", "STATE", "in_sentence", "title"]

BEYOND_STATE = ("activations", "workspace")
STATE = tuple(name for name in CATEGORIES if name not in BEYOND_STATE)
"""What a training holds from one step to the next."""


def in_sentence(name: str) -> str:
    """``optimizer state`` for ``optimizer_state``."""
    return "EMA" if name == "ema" else name.replace("_", " ")


def title(name: str) -> str:
    """``Optimizer state`` for ``optimizer_state``: a table's head, a legend's entry."""
    text = in_sentence(name)
    return text[0].upper() + text[1:]
