"""Reasons why the blocks of a library's model cannot be cut, found without memory.

Imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from strategies import initial
from strategies.parallel.tensor import layers
from strategies.parallel.tensor.products import mixing, products
from strategies.subject import Subject

OTHERWISE = "leave tp out, or take fsdp2"


@functools.lru_cache(maxsize=4)
def _plain(subject: Subject) -> nn.Module:
    """Return the model on meta."""
    with initial.valueless():
        return subject.make()


@functools.lru_cache(maxsize=64)
def unknown(subject: Subject) -> str:
    """Return the first layer of a block that ``products`` cannot cut, with the reason; empty if it
    finds all products of all blocks."""
    if subject.random_blocks:
        return f"its blocks have dropout, and ranks would draw other numbers; {OTHERWISE}"
    module = _plain(subject)
    names = {part: name for name, part in module.named_modules()}
    for block in subject.blocks(module):
        found = products(block)
        for name, part in block.named_modules():
            whole = f"{names[block]}.{name}"
            if name and name not in found and _multiplies(part, whole in subject.survey.linears):
                return f"{whole} ({type(part).__name__}) is no layer that it cuts; {OTHERWISE}"
        for name in mixing(block):
            return f"{names[block]}.{name} normalizes over several heads; {OTHERWISE}"
    return ""


def _multiplies(part: nn.Module, on_tokens: bool) -> bool:
    """Return whether ``part`` has a matrix for tokens. Modulation has one vector a sample."""
    if isinstance(part, nn.Linear | nn.Embedding):
        return on_tokens
    return any(p.ndim > 1 for p in part.parameters(recurse=False))


@functools.lru_cache(maxsize=64)
def counts(subject: Subject) -> tuple[tuple[int, str], ...]:
    """Return the numbers that ranks must divide, with their words."""
    module = _plain(subject)
    cuts = [cut for block in subject.blocks(module) for cut in products(block).values()]
    heads = {piece // cut.head for cut in cuts if cut.head > 1 for piece in cut.pieces}
    inner = {piece for cut in cuts if cut.head == 1 for piece in cut.pieces}
    words = ("heads", "inner features of the MLP")
    return tuple((n, word) for word, some in zip(words, (heads, inner), strict=True) for n in some)


@functools.lru_cache(maxsize=64)
def fails(subject: Subject, ranks: int) -> str:
    """Return the module that cannot compute with a rank's part, with the reason; empty if all can.

    It has positions for each head, for example.
    """
    shallow = subject.deep(dict.fromkeys(subject.depths, 1)) if subject.depths else subject
    within: list[nn.Module] = []
    with FakeTensorMode(allow_non_fake_inputs=True), _silent():
        module, sample = shallow.make(), shallow.example("cpu")
        for block in shallow.blocks(module):
            layers.cut_block(block, 0, ranks)
        for layer in layers.parallel_layers(module):  # without the sums
            layer.forward = types.MethodType(nn.Linear.forward, layer)
        for part in module.modules():
            part.register_forward_pre_hook(_entered(within))
            part.register_forward_hook(_left(within))
        try:
            shallow.predict(module, *sample)
        except Exception:
            name = next(name for name, part in module.named_modules() if part is within[-1])
            kind = type(within[-1]).__name__
            return f"{name} ({kind}) does not compute with a part of its heads; {OTHERWISE}"
    return ""


def _entered(within: list[nn.Module]) -> Any:
    return lambda part, *_: within.append(part)


def _left(within: list[nn.Module]) -> Any:
    def leave(*_: Any) -> None:
        within.pop()

    return leave


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Omit torch's log of the operation that fails."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
