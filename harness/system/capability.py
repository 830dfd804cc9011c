"""Compute capability: what NVIDIA GPUs can do since which generation. No torch."""

from __future__ import annotations

__all__ = ["SINCE", "shortfall"]

SINCE = {
    "bf16": (8, 0),
    "tf32": (8, 0),
    "sparse24": (8, 0),
    "fp8": (8, 9),
    "attention_flash": (8, 0),
    "attention_cudnn": (8, 0),
}
"""Need named in ``strategies`` -> the compute capability it begins with; others have no such."""


def shortfall(need: str, capability: tuple[int, int], card: str) -> str:
    """Why ``card`` is too old for ``need``, in words; empty where it is not."""
    least = SINCE.get(need, (0, 0))
    if capability >= least:
        return ""
    kind, _, kernel = need.partition("_")
    what = f"{kernel} {kind}" if kernel else need
    return f"{what} needs compute capability {_dotted(least)}; {card} has {_dotted(capability)}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
