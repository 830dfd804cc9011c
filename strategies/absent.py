"""Techniques that people ask for and that are no strategy here, each with the reason. No torch."""

from __future__ import annotations

__all__ = ["ABSENT", "absent"]

CACHE = "a DiT has no cache of keys and values, for all its tokens change in each evaluation"
ABSENT = {
    "flash_decoding": "it splits a long cache over a GPU while one token is decoded, and "
    f"{CACHE}; take attend:kernel=flash",
    "kv_cache": f"{CACHE}; take attend:kernel=flash",
    "paged_attention": f"it keeps a cache in pages, and {CACHE}; take attend:kernel=flash",
    "speculative_decoding": "it guesses tokens that are decoded one after the other, and a sampler "
    "changes all of them together; take fewer --sampler-steps, or a student (distill, distilled)",
}
"""Name -> why it is not here, then "; " and what there is instead."""


def absent(name: str) -> str | None:
    """Why there is no strategy of this name, however it is spelled; None: it is not known."""
    return ABSENT.get(name.lower().replace("-", "_"))
