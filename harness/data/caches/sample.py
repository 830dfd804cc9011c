"""One sample of a cache: which tensors it has, by what its files declare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Part", "Sample"]


@dataclass(frozen=True)
class Part:
    """One tensor: the file and the key that it lies under, its shape, the file's word for its type,
    and where its bytes begin (0 where a library finds them)."""

    path: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    start: int = 0


@dataclass(frozen=True)
class Sample:
    """``parts`` by the names that they have here: "latents"; "text", "mask" and "pooled" where they
    are there; "mean" and "scale", which latents are still to be normalised by.

    ``classes``: of the library that are trained from it. ``least_text``: tokens to which its
    trainer fills every text up with zeros. ``moments``: the latents may be mean and logarithm of
    the variance, one behind the other in channels.
    """

    name: str
    told: str
    classes: tuple[str, ...]
    parts: Mapping[str, Part]
    least_text: int = 0
    moments: bool = False
