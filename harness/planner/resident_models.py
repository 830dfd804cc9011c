"""Models that stay on each GPU beside a training: text encoders, the VAE. No torch.

They are the commonest surprise of a plan that counts the trained model alone. Their weights are
counted as they are stored (``beside.yaml``); what their forward passes take is not: an encoder runs
under ``no_grad`` before the step, when the step's own activations are not there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.planner.speed.cards import parse_bytes
from strategies.base import BadInput
from strategies.recipe import nearest

FILE = Path(__file__).with_name("resident_models.yaml")
USUAL = "usual"
"""What stands for a public model's own encoders and VAE."""
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "nf4": 0.5}
"""Stored type -> bytes an element; the scales of quantised types are some percent more."""
STORED = "bf16"


@dataclass(frozen=True)
class Beside:
    """One model beside the training: its name as it was asked for, and its bytes on each GPU."""

    name: str
    bytes: int


@functools.cache
def _file() -> Mapping[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def table() -> Mapping[str, Mapping[str, Any]]:
    """Name -> class, config, elements, and who told."""
    return _file()["models"]


def usual_of(model: str) -> Sequence[str]:
    """What a public model's pipeline brings; empty where it is not known."""
    return _file()["usual"].get(model, ())


def of(asked: Sequence[str], model: str, option: str = "also") -> list[Beside]:
    """What ``--also`` (or another ``option``) names: a model of the table, perhaps with its type
    (``T5-XXL:fp8``), a size (``2.5GiB``), or all that ``model`` usually brings.

    Raises:
        BadInput: an unknown name or type.
    """
    names: list[str] = []
    for word in asked:
        kind, _, stored = word.partition(":")
        own = [f"{name}:{stored}" if stored else name for name in usual_of(model)]
        if kind == USUAL and not own:
            raise BadInput(
                f"{option} is {word}, and what model {model} brings is not known; name it, as "
                "T5-XXL, or give its size, as 2.5GiB"
            )
        names += own if kind == USUAL else [word]
    return [named(name, option) for name in dict.fromkeys(names)]


def named(word: str, option: str = "also") -> Beside:
    """One of the table, or a size.

    Raises:
        BadInput: an unknown name or type.
    """
    if word[:1].isdigit():
        return Beside(word, parse_bytes(word, option))
    name, _, stored = word.partition(":")
    known = {key.lower(): key for key in table()}
    if name.lower() not in known:
        hint = nearest(name, [*table(), USUAL])
        what = f"{option} is {word!r}, which is no known model"
        raise BadInput(f"{what}; {hint} Or a size, as 2.5GiB")
    if stored and stored not in BYTES:
        raise BadInput(f"{option} is {word!r}; its type is one of {', '.join(BYTES)}")
    elements = table()[known[name.lower()]]["elements"]
    told = known[name.lower()] + f":{stored}" * bool(stored)
    return Beside(told, int(elements * BYTES[stored or STORED]))


def before_words(before: str) -> str:
    """What a pool's history is, in a sentence."""
    found = [named(word, "before") for word in before.split(",")]
    parts = [f"{one.name} {one.bytes / 2**30:.1f}" for one in found]
    return (
        f"Before the training each GPU held {', '.join(parts)} GiB of weights. They were freed, "
        "and torch's pool kept their memory (no torch.cuda.empty_cache() after them): the "
        "training's tensors are put into it as far as they go. What their own forward left is not "
        "counted."
    )


def words(found: Sequence[Beside], at_work: bool = False) -> str:
    """Say what is counted; ``at_work``: a phase counts their forward passes."""
    parts = [f"{one.name} {one.bytes / 2**30:.1f}" for one in found]
    return (
        f"Needs includes what stays on each GPU beside the training: {', '.join(parts)} GiB of "
        f"weights; what their own forward takes is{'' if at_work else ' not'} counted."
    )
