"""The size of a public model's sample, as a spec asks for it: pixels, frames, tokens. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from harness.subjects.library.families import Family, Space
from strategies.base import BadInput
from strategies.subject import Shaping

__all__ = ["larger", "space_of"]

LARGEST_SIDE, MOST_LATENTS = 8192, 1024
"""Pixels of the shorter side, and latents of a video, beyond which no search goes."""


def space_of(shaping: Shaping, family: Family, usual: Mapping[str, Any], down: int) -> Space:
    """The size of a sample's latent.

    Raises:
        BadInput: sides or frames that the model does not take; names the nearest.
    """
    height, width = _sides(shaping.resolution or usual.get("resolution", family.resolution))
    step = down * family.tile
    for side in (height, width):
        if side < step or side % step:
            near = max(step, round(side / step) * step)
            raise BadInput(
                f"resolution is {shaping.resolution}; the model takes sides that are multiples of "
                f"{step} pixels, as {near}"
            )
    frames = shaping.frames or usual.get("frames", family.frames)
    if frames != 1 and (not family.every or (frames - 1) % family.every):
        near = 1 + family.every * max(1, round((frames - 1) / max(1, family.every)))
        what = f"1 + a multiple of {family.every}, as {near}" if family.every else "images: 1"
        raise BadInput(f"frames is {frames}; the model takes {what}")
    if shaping.text and not family.text:
        raise BadInput(f"text is {shaping.text}; the model reads no text: leave --text out")
    text = shaping.text or usual.get("text", family.text_tokens)
    latents = 1 + (frames - 1) // family.every if family.every else 1
    return Space(latents, height // down, width // down, text)


def larger(
    axis: str, space: Space, family: Family, down: int
) -> list[tuple[Mapping[str, Any], float]]:
    """Samples that grow from the smallest one, in the proportions of ``space``: (fields of a spec
    that ask for it, how many times the elements of ``space``)."""
    if axis == "frames":
        number = MOST_LATENTS if family.every else 0
        return [({"frames": 1 + family.every * n}, (n + 1) / space.frames) for n in range(number)]
    if axis != "resolution":
        return []
    short, long = sorted((space.height, space.width))
    found = []
    for tiles in range(1, LARGEST_SIDE // (down * family.tile) + 1):
        pair = (tiles * family.tile, round(tiles * long / short) * family.tile)
        height, width = pair if space.height <= space.width else pair[::-1]
        pixels = f"{height * down}x{width * down}"
        found.append(({"resolution": pixels}, height * width / (space.height * space.width)))
    return found


def _sides(text: str) -> tuple[int, int]:
    """``1024`` or ``480x832``: height and width in pixels."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip())
    if not match:
        raise BadInput(f"resolution is {text!r}; write pixels, as 1024, or HEIGHTxWIDTH")
    return int(match[1]), int(match[2] or match[1])
