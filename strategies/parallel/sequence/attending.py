"""Where attention is made to see the tokens of other ranks: at the attribute ``attend`` where a
model has it, else around torch's attention while the model's blocks run.

Attention of a rank's tokens to a text that all ranks have whole needs nobody else's: where keys are
not as many as queries, nothing is exchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from strategies.activations.runners import runner_of, surround
from strategies.parallel.sequence.exchanges import plain
from strategies.subject import Subject

__all__ = ["Exchanging", "alone", "connect", "install", "keep_to_own"]

Way = Callable[[Any], Any]
"""What makes of attention one that sees all tokens (``exchanges.Ulysses``), its group given."""


class Exchanging:
    """A way to run blocks in which torch's attention sees the tokens of the whole group; as it is
    without a ``way``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.way: Way | None = None

    def __call__(self, blocks: Any, *given: Any, **named: Any) -> Any:
        if self.way is None:
            return self.inner(blocks, *given, **named)
        with _Attention(self.way):
            return self.inner(blocks, *given, **named)


class _Attention(TorchFunctionMode):
    """Puts ``way`` around torch's attention."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **named)
        query, key, value, *more = _operands(args, named)
        if query.shape[-2] != key.shape[-2]:
            return func(*args, **named)
        rest = {k: v for k, v in named.items() if k not in ("query", "key", "value")}
        if more or rest.get("attn_mask") is not None:
            raise NotImplementedError("a mask is of whole samples: attention with one is not cut")
        return self.way(lambda q, k, v: func(q, k, v, **rest))(query, key, value)


def _operands(args: Any, named: dict[str, Any]) -> list[Any]:
    """Query, key and value, however they were given, and what was given by place behind them."""
    names = ("query", "key", "value")[len(args) :]
    return [*args, *(named[name] for name in names)]


def install(module: Any, subject: Subject) -> None:
    """Prepare a model whose attention cannot be replaced; called before its blocks are wrapped to
    be recomputed, so that what is recomputed is exchanged again."""
    if "attend" not in subject.parts:
        surround(module, subject, Exchanging)


def connect(module: Any, subject: Subject, way: Way) -> None:
    """Have attention see the tokens of the group from now on."""
    if "attend" not in subject.parts:
        runner_of(module, Exchanging).way = way
        return
    for layer in subject.attentions(module):
        layer.attend = way(layer.attend)


def keep_to_own(module: Any, subject: Subject) -> None:
    """Have attention see what it is given, and nothing else, from now on."""
    if "attend" not in subject.parts:
        runner_of(module, Exchanging).way = None
        return
    for layer in subject.attentions(module):
        layer.attend = plain(layer.attend)


@contextlib.contextmanager
def alone(module: Any, subject: Subject) -> Iterator[None]:
    """``keep_to_own`` for a while."""
    layers = subject.attentions(module) if "attend" in subject.parts else []
    runner = runner_of(module, Exchanging)
    kept, way = [layer.attend for layer in layers], runner and runner.way
    keep_to_own(module, subject)
    try:
        yield
    finally:
        for layer, attend in zip(layers, kept, strict=True):
            layer.attend = attend
        if runner is not None:
            runner.way = way
