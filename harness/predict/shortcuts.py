"""Short ways through what a large world repeats: a thousand equal pieces of one gathered buffer.

ZeRO-3 cuts each gathered buffer into a piece a rank, twice, and joins the pieces: at 64 ranks
nine tenths of a prediction's time. On tensors without storage all pieces of one length are alike:
the memory that they hold is the buffer's, and what is joined is as large as the pieces together.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Shortcuts", "stays_in_backward"]

MANY = 8


class Shortcuts(TorchFunctionMode):
    """Answers repeated ``narrow`` of the same tensor, and ``cat`` of many flat pieces."""

    def __init__(self) -> None:
        super().__init__()
        self._whole: Any = None
        self._piece: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.narrow and len(args) == 4 and not args[0].requires_grad:
            return self._narrow(*args)
        if func is torch.cat and len(args) == 1 and not kwargs and len(args[0]) > MANY:
            pieces = args[0]
            if all(p.ndim == 1 and not p.requires_grad for p in pieces):
                return pieces[0].new_empty(sum(len(p) for p in pieces))
        return func(*args, **kwargs)

    def _narrow(self, whole: Any, dim: int, start: Any, length: Any) -> Any:
        """A piece of flat ``whole``; the next one of the same length is the same object.

        Weak references: neither may outlive its counterpart in a real run.
        """
        piece = self._piece() if self._piece and self._whole() is whole else None
        if piece is not None and whole.ndim == 1 and len(piece) == length:
            return piece
        piece = whole.narrow(dim, start, length)
        self._whole, self._piece = weakref.ref(whole), weakref.ref(piece)
        return piece


@contextlib.contextmanager
def stays_in_backward(mode: TorchFunctionMode) -> Iterator[None]:
    """``mode`` on, in backward too: torch takes function modes off while ``backward`` runs, and
    what is recomputed there would escape it."""
    run: Callable[..., Any] = torch.autograd._engine_run_backward

    def run_backward(*given: Any, **more: Any) -> Any:
        with mode:
            return run(*given, **more)

    with mock.patch.object(torch.autograd, "_engine_run_backward", run_backward), mode:
        yield
