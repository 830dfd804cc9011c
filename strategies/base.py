"""Base types of recipes: slots, traits, parity, settings, errors, attachments and buffer sizes."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


def load(place: str) -> Any:
    """Import and return a "module:name"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


class LazyTable(UserDict[str, Any]):
    """Mapping of names to classes that imports a class's module at its first look-up. A value is
    "module:Class" or a ``partial`` that makes the class."""

    def __getitem__(self, name: str) -> Any:
        found = self.data[name]
        if isinstance(found, str):
            found = self.data[name] = load(found)
        elif isinstance(found, partial):
            found = self.data[name] = found()
        return found


class Slot(IntEnum):
    """Slots of a training step or a sampling batch, in the order in which strategies fill them."""

    SHARD = 0
    PRECISION = 1
    SWAP = 2
    CAST = 3
    ADAPT = 4
    SPARSIFY = 5
    STORE = 6
    ATTEND = 7
    SEQUENCE = 8
    TENSOR = 9
    RECOMPUTE = 10
    OFFLOAD = 11
    COMPILE = 12
    LOSS = 13
    OPTIMIZE = 14
    STEP = 15
    ACCUMULATE = 16
    COMPRESS = 17
    AVERAGE = 18


ALTERS = {
    "rounding": "operands of products, or weights, are rounded to a shorter type",
    "forward": "the forward pass computes something else",
    "gradients": "gradients are not those of all weights, or are changed on their way",
    "update": "the optimizer writes something else than AdamW would",
}
"""Effect that a strategy may have by design -> meaning. It decides how far a row's steps may differ
from the reference's (``harness.report.figures.parity``)."""


def parity(alters: Sequence[Any]) -> str:
    """Return the relation of losses to the reference row's: "exact", equal within float rounding,
    or "by design" if something ``alters`` them on purpose, whose difference is not wrong."""
    return "by design" if alters else "exact"


@dataclass(frozen=True)
class Reason:
    """Why a run cannot start, failed or does not count: ``text``, and ``hint``, the remedy.

    ``about`` names the strategy that refuses, or the lacking resource (``GPUS``): code compares it,
    and never reads the text.
    """

    text: str
    hint: str = ""
    about: str = ""

    @classmethod
    def read(cls, sentence: str, about: str = "") -> Reason:
        """Return the reason that a strategy or an error states as "cause; remedy"."""
        text, _, hint = sentence.partition("; ")
        return cls(text, hint, about)

    def __str__(self) -> str:
        return f"{self.text}; {self.hint}" if self.hint else self.text


GPUS = "gpus"
"""``Reason.about`` if a machine has fewer GPUs than processes."""


class BadInput(ValueError):
    """Unusable user input: one line with the cause and the remedy. Any other ValueError is a bug of
    Headroom, and is reported as one."""

    @property
    def reason(self) -> Reason:
        """The message as its cause and its remedy."""
        return Reason.read(str(self))


class Conflict(BadInput):
    """Invalid recipe: two strategies in one slot, or a strategy that refuses its launch."""


class NotInForce(AssertionError):
    """Missing effect: a strategy was requested and its effect could not be read back."""


def demand(fact: bool, message: str) -> None:
    """Raise NotInForce(message) if ``fact`` is false. Evidence fails only through this function."""
    if not fact:
        raise NotInForce(message)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Training hyperparameters, equal for every engine. ``grad_clip`` 0 disables clipping,
    ``ema_decay`` 0 the weight average."""

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 0.0
    ema_decay: float = 0.9999

    @property
    def adam(self) -> dict[str, Any]:
        """Keyword arguments shared by every Adam of torch, torchao, bitsandbytes and DeepSpeed."""
        names = {"lr": self.learning_rate, "betas": self.betas, "eps": self.eps}
        return names | {"weight_decay": self.weight_decay}


class Attachment:
    """Objects that a strategy keeps alive with the trained model (weight average, masks, hooks)."""

    def after_step(self) -> None:
        """Run after every optimizer step."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return every tensor held, so that the memory meter can categorize the bytes."""
        return ()

    def weights(self) -> Iterable[torch.Tensor]:
        """Return those of ``tensors`` that are model weights and count as parameters."""
        return ()

    def averages(self) -> Sequence[torch.Tensor]:
        """Return averages of the weights, laid out as ``Engine.shards``; empty if it keeps none."""
        return ()

    def hosted(self) -> Iterable[torch.Tensor]:
        """Return those of ``tensors`` that were put into host memory, which a CPU's tensor does not
        show."""
        return ()

    def leaves(self) -> Iterable[torch.Tensor]:
        """Return leaves at which gradients arrive that are no parameters of the model."""
        return ()

    def makers(self) -> Iterable[Any]:
        """Return methods whose allocations have another placement than their operands
        (``strategies.inventory.AllocationScope``)."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, which is saved with the engine's checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a ``state_dict`` that a rank of the same number returned."""


# ---- buffer sizes ----


class Sizes(NamedTuple):
    """Element counts from which buffer sizes are computed.

    ``total``: all trained parameters. ``block``, ``tensor``, ``bias``: the largest block, parameter
    and one-dimensional parameter. ``weights``: each trained parameter that is no bias, if known.
    ``here``: trained elements of a shallow model in place of one of ``total`` elements; else 0.
    """

    total: int
    block: int
    tensor: int
    bias: int
    weights: tuple[int, ...] = ()
    here: int = 0


def pinned_block(size: int) -> int:
    """Return the bytes of pinned host memory that torch allocates for ``size``: the next power of
    two (torch 2.13, ATen/core/CachingHostAllocator.h, allocate, with the default settings)."""
    return 1 << (size - 1).bit_length() if size else 0
