"""Caches of musubi-tuner: safetensors files, latents in one and text embeddings in another.

They are written by version 0.3.4 (``format_version`` 1.0.1). Source: dataset/cache_io.py,
image_video_dataset.py and architectures.py. ``NAME_WWWWxHHHH_ARCH.safetensors`` holds
``latents_FxHxW_TYPE`` [C, F, H, W], or [C, H, W] of images; ``NAME_ARCH_te.safetensors`` holds the
text. Only in the first file, a video's NAME ends with its frames (``_00000-081``). Imports no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from harness.data.caches.entries import Contents, Part, Sample, contents
from harness.data.caches.entries import tensor as tensor
from strategies.base import BadInput

hint = "it should hold NAME_0832x0480_wan.safetensors and NAME_wan_te.safetensors, say"


class Kept(NamedTuple):
    """Cache contents of an architecture: the classes that train on it, and the keys of its text,
    without their types."""

    classes: tuple[str, ...]
    text: str
    mask: str = ""
    pooled: str = ""
    least_text: int = 0


FLUX2 = Kept(("Flux2Transformer2DModel",), "ctx_vec")
KEPT = {
    "hunyuan_video": Kept(("HunyuanVideoTransformer3DModel",), "llm", "llm_mask", "clipL"),
    # Its trainer pads texts to 512 tokens: wan/modules/model.py, text_len.
    "wan": Kept(("WanTransformer3DModel",), "varlen_t5", least_text=512),
    "flux_2_dev": FLUX2,
    "flux_2_klein_4b": FLUX2,
    "flux_2_klein_9b": FLUX2,
    "qwen_image": Kept(("QwenImageTransformer2DModel",), "varlen_vl_embed"),
    "z_image": Kept(("ZImageTransformer2DModel",), "varlen_llm_embed"),
}
"""``architecture`` of a file -> its contents.

Omitted are architectures with a control image beside the sample (Kontext, edit, layered, FramePack)
and classes that are not trained here.
"""
NAMED = re.compile(r"(?P<key>.+)_\d+x\d+_(?P<arch>[a-z0-9]+)\.safetensors")
FRAMES = re.compile(r"_\d{5}-\d{3,}(-\d+)?$")
TYPE = re.compile(r"_(float|bfloat|int|uint|bool)[0-9a-z_]*$")
BESIDE = ("latents_control", "latents_image", "latents_clean", "clip", "siglip", "f_indices")
"""Prefixes of keys that a text-to-image or text-to-video training does not read."""


def find(folder: Path) -> list[Sample]:
    """Return the samples of a folder, by name.

    Raises:
        BadInput: one line that names the file, its error and a remedy.
    """
    files = sorted(folder.glob("*.safetensors"))
    return [_sample(path) for path in files if not path.stem.endswith("_te")]


def _sample(path: Path) -> Sample:
    named = NAMED.fullmatch(path.name)
    if not named:
        raise BadInput(f"{path} does not have a name of a musubi-tuner cache; {hint}")
    held = contents(path)
    kept, told = _kept(path, held), held.metadata["architecture"]
    other = _texts_of(path, named["key"], named["arch"])
    text = contents(other)
    if text.metadata.get("architecture") != told:
        found = text.metadata.get("architecture")
        raise BadInput(
            f"{other} is for architecture {found}, but its latents are for {told}; cache it again"
        )
    parts = {"latents": _latents(path, held), "text": _by_key(other, text, kept.text)}
    for name, key in (("mask", kept.mask), ("pooled", kept.pooled)):
        if key:
            parts[name] = _by_key(other, text, key)
    return Sample(path.name, told, kept.classes, parts, kept.least_text)


def _kept(path: Path, held: Contents) -> Kept:
    found = held.metadata.get("architecture")
    if found not in KEPT:
        raise BadInput(
            f"{path} is for architecture {found}, which no supported model has; use one "
            f"of {', '.join(KEPT)}"
        )
    version = held.metadata.get("format_version", "")
    if not version.startswith("1."):
        raise BadInput(
            f"{path} has format_version {version!r}, and only 1.0.1 is supported; cache it "
            "again with musubi-tuner"
        )
    beside = [key for key in held.parts if key.startswith(BESIDE)]
    if beside:
        raise BadInput(
            f"{path} has {beside[0]}, a control or first image, but models are trained "
            "here on text alone; cache it for text to video"
        )
    return KEPT[found]


def _texts_of(path: Path, key: str, arch: str) -> Path:
    """Return the text's file, whose name lacks the frames of a video."""
    found = path.with_name(f"{key}_{arch}_te.safetensors")
    if not found.exists():
        found = path.with_name(f"{FRAMES.sub('', key)}_{arch}_te.safetensors")
    if not found.exists():
        raise BadInput(
            f"{found} is missing, the text of {path.name}; cache text encoder outputs too"
        )
    return found


def _latents(path: Path, held: Contents) -> Part:
    found = [part for key, part in held.parts.items() if key.startswith("latents_")]
    if len(found) != 1 or len(found[0].shape) not in (3, 4):
        raise BadInput(
            f"{path} has {_told(held.parts)}, but needs one latents_FxHxW with 3 or 4 axes; "
            "cache it again"
        )
    return found[0]


def _by_key(path: Path, held: Contents, name: str) -> Part:
    """Return the tensor of that name, in any type."""
    found = [part for key, part in held.parts.items() if TYPE.sub("", key) == name]
    if not found:
        raise BadInput(f"{path} has no {name}, but {_told(held.parts)}; cache the text again")
    return found[0]


def _told(parts: Mapping[str, Part]) -> str:
    return ", ".join(f"{key} {list(part.shape)}" for key, part in parts.items()) or "nothing"
