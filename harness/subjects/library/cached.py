"""Caches of other trainers as samples of a class of the library: by sizes, in its own layout.

A cache holds samples of several sizes (buckets); a batch is of one, and so is a run: that which was
asked for, or the largest, which decides whether a training fits.

Shape suffixes: C channels, F frames, H height, W width of a latent; T tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.data.caches.named import Cache, open_cache
from harness.data.caches.sample import Sample
from harness.subjects.library.families import Family, Space
from strategies.base import BadInput
from strategies.subject import Shaping

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Bucket", "Sized", "buckets_of", "chosen", "row"]

PACKED = 4
"""Elements of a latent in a token of the layout "packed"."""


@dataclass(frozen=True)
class Sized:
    """What the model takes: its class, its configuration, the pixels for an element of a latent."""

    family: Family
    config: Mapping[str, Any]
    down: int

    @property
    def channels(self) -> int:
        """Channels of a latent before tokens are made of it."""
        channels = self.family.value(self.config, "in_channels")
        return channels // PACKED if self.family.layout == "packed" else channels


class Bucket(NamedTuple):
    """Samples of one size; ``space.text`` is the longest of their texts."""

    space: Space
    samples: tuple[Sample, ...]

    def words(self, sized: Sized) -> str:
        """Its pixels and frames, as a spec asks for them."""
        space, every = self.space, sized.family.every
        frames = f" of {(space.frames - 1) * every + 1} frames" if every else ""
        return f"{space.height * sized.down}x{space.width * sized.down}{frames}"

    def asked(self, sized: Sized) -> dict[str, Any]:
        """The fields of a spec that ask for made-up samples of this size."""
        space, every = self.space, sized.family.every
        sides = f"{space.height * sized.down}x{space.width * sized.down}"
        frames = (space.frames - 1) * every + 1 if every else 0
        return {"resolution": sides, "frames": frames, "text": space.text}


class Latent(NamedTuple):
    """The axes of a latent in its file; ``folded``: 2 x 2 elements are one already."""

    channels: int
    frames: int
    height: int
    width: int
    folded: bool


def buckets_of(name: str, sized: Sized, model: str) -> list[Bucket]:
    """The buckets of the cache called ``name``, the largest first.

    Raises:
        BadInput: it is of another model, or a sample has not what the model takes.
    """
    cache = open_cache(name)
    mine = [sample for sample in cache.samples if sized.family.name in sample.classes]
    if not mine:
        told = ", ".join(sorted({s.told for s in cache.samples} - {""})) or "other classes"
        raise BadInput(
            f"data is {name}, a cache of {told}, which model {model} is not trained from; give a "
            f"model of {' or '.join(sorted({c for s in cache.samples for c in s.classes}))}"
        )
    found: dict[tuple[int, int, int], list[Sample]] = {}
    for sample in mine:
        found.setdefault(_size(sample, sized), []).append(sample)
    made = [Bucket(Space(*size, _longest(some)), tuple(some)) for size, some in found.items()]
    return sorted(made, key=lambda b: (-_elements(b.space), b.space))


def _elements(space: Space) -> int:
    return space.frames * space.height * space.width


def chosen(found: list[Bucket], sized: Sized, shaping: Shaping) -> Bucket:
    """The bucket that a spec asks for by its pixels and frames; the largest where it does not.

    Raises:
        BadInput: there is none of that size; names those that are.
    """
    if shaping.text:
        raise BadInput(f"text is {shaping.text}, and {shaping.data} has texts: leave --text out")
    sides = tuple(int(n) for n in re.findall(r"\d+", shaping.resolution))
    sides = sides * 2 if len(sides) == 1 else sides
    for bucket in found:
        space, down = bucket.space, sized.down
        right = not sides or sides == (space.height * down, space.width * down)
        frames = (space.frames - 1) * sized.family.every + 1
        if right and shaping.frames in (0, frames):
            return bucket
    asked = " of ".join(filter(None, (shaping.resolution, shaping.frames and f"{shaping.frames}")))
    raise BadInput(
        f"data is {shaping.data}, which has no samples of {asked}; give --resolution (and "
        f"--frames) as one of {', '.join(b.words(sized) for b in found[:12])}"
    )


# ---- what a sample is ----


def _size(sample: Sample, sized: Sized) -> tuple[int, int, int]:
    """Frames, height and width of its latent, as the model counts them; all of it checked."""
    latent, family = _latent(sample, sized), sized.family
    fold = 2 if latent.folded else 1
    height, width = latent.height * fold, latent.width * fold
    if height % family.tile or width % family.tile or (latent.frames > 1 and not family.every):
        raise BadInput(
            f"{_of(sample, 'latents')} is a latent of {latent.frames} x {height} x {width}; the "
            f"model takes sides that are multiples of {family.tile}"
            + ("" if family.every else ", and images alone")
        )
    _check_conditions(sample, sized)
    return latent.frames, height, width


def _latent(sample: Sample, sized: Sized) -> Latent:
    shape, wanted = sample.parts["latents"].shape, sized.channels
    if len(shape) == 4 and sample.moments and sized.family.layout == "frames":
        shape = (shape[1], shape[0], *shape[2:])
    channels, *sides = shape if len(shape) == 4 else (*shape[:1], 1, *shape[1:])
    folded = sized.family.layout == "packed" and channels == PACKED * wanted
    allowed = {wanted, PACKED * wanted if folded else wanted}
    allowed |= {2 * wanted} if sample.moments else set()
    if len(sides) != 3 or channels not in allowed:
        also = f" (or {2 * wanted}, as moments)" if sample.moments else ""
        raise BadInput(
            f"{_of(sample, 'latents')} has shape {list(sample.parts['latents'].shape)}, and the "
            f"model's latents have {wanted} channels{also}; is the cache of another model?"
        )
    return Latent(channels, *sides, folded)


def _check_conditions(sample: Sample, sized: Sized) -> None:
    family, parts = sized.family, sample.parts
    widths = {"text": family.text, "pooled": family.pooled}
    for name, key in widths.items():
        if not key:
            continue
        if name not in parts:
            raise BadInput(f"{sample.name} has no {name}, which the model reads; cache it again")
        shape, width = parts[name].shape, family.value(sized.config, key)
        axes = 2 if name == "text" else 1
        if len(shape) != axes or shape[-1] != width:
            raise BadInput(
                f"{_of(sample, name)} has shape {list(shape)}, and the model reads {name} of width "
                f"{width}; is the cache of another model?"
            )
    if "mask" in parts and parts["mask"].shape != parts["text"].shape[:1]:
        raise BadInput(
            f"{_of(sample, 'mask')} has shape {list(parts['mask'].shape)}, its text "
            f"{list(parts['text'].shape)}; cache the text again"
        )


def _of(sample: Sample, name: str) -> str:
    part = sample.parts[name]
    return f"{part.path}: {part.key}"


def _longest(samples: list[Sample]) -> int:
    return max(max(s.parts["text"].shape[0], s.least_text) for s in samples)


# ---- its tensors ----


def row(cache: Cache, sample: Sample, space: Space, sized: Sized) -> dict[str, Tensor]:
    """One sample as the model takes it, float32: "x", and its conditions by name."""
    import torch

    parts = {name: cache.tensor(part) for name, part in sample.parts.items()}
    text = parts["text"].float()
    tokens, missing = len(text), space.text - len(text)
    found = {"x": _laid(_values(parts, sample, sized), _latent(sample, sized), sized.family)}
    found["text"] = torch.nn.functional.pad(text, (0, 0, 0, missing))
    if sized.family.masked:
        mask = parts["mask"].bool() if "mask" in parts else torch.ones(tokens, dtype=torch.bool)
        found["mask"] = torch.nn.functional.pad(mask, (0, missing))
    if sized.family.pooled:
        found["pooled"] = parts["pooled"].float()
    return found


def _values(parts: Mapping[str, Tensor], sample: Sample, sized: Sized) -> Tensor:
    """The latent as [C, F, H, W]: the mean of moments, normalised by what lies beside it."""
    latent = parts["latents"].float()
    latent = latent[:, None] if latent.ndim == 3 else latent
    if sample.moments and sized.family.layout == "frames":
        latent = latent.transpose(0, 1)
    if sample.moments:
        latent = latent[: sized.channels]
    if "mean" in parts and "scale" in parts:
        mean, scale = (parts[name].float().view(-1, 1, 1, 1) for name in ("mean", "scale"))
        # finetrainers keeps one over the deviation for Wan, and the deviation for LTX-Video.
        inverse = sized.family.name == "WanTransformer3DModel"
        latent = (latent - mean) * (scale if inverse else 1 / scale)
    return latent


def _laid(latent_CFHW: Tensor, kind: Latent, family: Family) -> Tensor:
    """In the layout of the class (``families.LAYOUTS``)."""
    if family.layout == "image":
        return latent_CFHW[:, 0]
    if family.layout == "frames":
        return latent_CFHW.transpose(0, 1).contiguous()
    if family.layout == "tokens":
        return latent_CFHW.flatten(1).T.contiguous()
    if family.layout == "packed":
        image = latent_CFHW[:, 0]
        if kind.folded:
            return image.flatten(1).T.contiguous()
        c, h, w = image.shape
        image = image.view(c, h // 2, 2, w // 2, 2).permute(1, 3, 0, 2, 4)
        return image.reshape(h * w // 4, c * PACKED)
    return latent_CFHW
