"""Models that stay on each GPU during a training: text encoders and the VAE.
A plan counts their weights in the stored dtype (``resident_models.yaml``). It does not count their
forward passes: encoders run under ``no_grad`` before the step, when the step's own activations are
not allocated. Does not import torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.spec import Spec
from harness.system.cards import parse_bytes
from strategies.base import BadInput
from strategies.files import own_table
from strategies.words import nearest

FILE = Path(__file__).with_name("resident_models.yaml")
USUAL = "usual"
"""Word for all encoders and the VAE of a public model."""
PARTS = {"encoders": (False,), "vae": (True,), USUAL: (False, True)}
"""Part of a model's others -> whether its models are a VAE."""
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "nf4": 0.5}
"""Stored dtype -> bytes per element. The scales of quantized dtypes add a few percent."""
STORED = "bf16"


@dataclass(frozen=True)
class ResidentModel:
    """One resident model: its name as requested, and its bytes on each GPU."""

    name: str
    bytes: int


@functools.cache
def _file() -> Mapping[str, Any]:
    return own_table(FILE)


def table() -> Mapping[str, Mapping[str, Any]]:
    """Return name -> class, config, elements and source."""
    return _file()["models"]


def usual_of(model: str) -> Sequence[str]:
    """Return the names of the encoders and VAE of a public model; empty if unknown."""
    return _file()["usual"].get(model, ())


def part_of(model: str, kind: str) -> list[str]:
    """Return the other models of a public model as ``--also`` names them; empty if unknown.
    ``kind``: encoders, vae or usual, which is both; perhaps with the encoders' dtype, as
    ``encoders:int8``."""
    kind, _, stored = kind.partition(":")
    wanted = PARTS[kind]
    found = [name for name in usual_of(model) if ("latent" in table()[name]) in wanted]
    return [f"{name}:{stored}" if stored else name for name in found]


def part_in(ways: Sequence[str]) -> str:
    """Return the part of a model's others that the ways of a phase name; usual for none."""
    return next((way for way in ways if way in PARTS), USUAL)


def passes(spec: Spec) -> dict[str, int]:
    """Return model -> bytes that one pass of it takes beyond its weights, to encode one sample of
    the preset's usual size; empty for another size."""
    if spec.resolution or spec.frames or spec.text:
        return {}
    found = _file()["passes"].get(spec.model, {})
    return {name: size * 2**20 for name, size in found.items()}


def of(asked: Sequence[str], model: str) -> list[ResidentModel]:
    """Return the models that ``--also`` names.

    A word is a model of the table, perhaps with its dtype (``T5-XXL:fp8``), or a size (``2.5GiB``).
    ``usual`` names all encoders and the VAE of ``model``.

    Raises:
        BadInput: an unknown name or dtype.
    """
    names: list[str] = []
    for word in asked:
        own = part_of(model, word) if word.partition(":")[0] == USUAL else [word]
        if not own:
            raise BadInput(
                f"also is {word}, but the other models of {model} are not known; name "
                "one, such as T5-XXL, or give its size, such as 2.5GiB"
            )
        names += own
    return [named(name) for name in dict.fromkeys(names)]


def named(word: str) -> ResidentModel:
    """Return the model of the table, or of the size, that ``word`` names.

    Raises:
        BadInput: an unknown name or dtype.
    """
    if word[:1].isdigit():
        return ResidentModel(word, parse_bytes(word, "also"))
    name, _, stored = word.partition(":")
    known = {key.lower(): key for key in table()}
    if name.lower() not in known:
        hint = nearest(name, [*table(), USUAL])
        what = f"also is {word!r}, which is not a known model"
        raise BadInput(f"{what}; {hint} Or a size, as 2.5GiB")
    if stored and stored not in BYTES:
        raise BadInput(f"also is {word!r}; its type is one of {', '.join(BYTES)}")
    elements = table()[known[name.lower()]]["elements"]
    text = known[name.lower()] + f":{stored}" * bool(stored)
    return ResidentModel(text, int(elements * BYTES[stored or STORED]))


def words(found: Sequence[ResidentModel], at_work: bool = False) -> str:
    """Return a sentence about the counted models. ``at_work``: their forward passes are counted
    too."""
    parts = [f"{one.name} {one.bytes / 2**30:.1f}" for one in found]
    return (
        f"Needs includes what stays on each GPU beside the training: {', '.join(parts)} GiB of "
        f"weights; what their own forward takes is{'' if at_work else ' not'} counted."
    )
