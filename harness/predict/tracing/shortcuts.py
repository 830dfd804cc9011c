"""Short ways through what a large world repeats: a thousand equal pieces of one buffer.

ZeRO-3 cuts each gathered buffer and each gradient into a piece a rank and joins the pieces, which
at 1024 ranks takes nine tenths of a prediction's time. On tensors without storage all pieces of one
length are alike: the memory that they hold is the buffer's, and what is joined is as large as the
pieces together. So one piece stands for all, and neither memory nor work changes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from strategies.evidence import frozen

__all__ = ["Shortcuts", "first_pieces", "stays_in_backward"]

MANY = 8


class Shortcuts(TorchFunctionMode):
    """Answers repeated cuts of the same flat tensor, and ``cat`` of many flat pieces."""

    def __init__(self) -> None:
        super().__init__()
        self._whole = self._piece = _nothing
        self._size, self._length = 0, -1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs:
            if func is torch.Tensor.narrow and len(args) == 4:
                return self._narrow(*args)
            if func is torch.Tensor.__getitem__ and type(args[1]) is slice:
                return self._cut(*args)
            if func is torch.chunk and len(args) == 2:
                return _chunk(*args)
            if func is torch.cat and len(args) == 1 and len(args[0]) > MANY:
                return _join(args[0])
        return func(*args, **(kwargs or {}))

    def _narrow(self, whole: Any, dim: int, start: Any, length: Any) -> Any:
        """A piece of flat ``whole``; the next one of the same length is the same object."""
        if whole is self._whole() and length == self._length:
            piece = self._piece()
            if piece is not None:
                return piece
        return self._keep(whole, whole.narrow(dim, start, length))

    def _cut(self, whole: Any, part: slice) -> Any:
        """``whole[part]``, in the same way."""
        if whole is self._whole() and part.step is None:
            start, stop, _ = part.indices(self._size)
            piece = self._piece() if max(0, stop - start) == self._length else None
            if piece is not None:
                return piece
        return self._keep(whole, whole[part])

    def _keep(self, whole: Any, piece: Any) -> Any:
        """Remember both by weak references: neither may outlive its counterpart in a real run."""
        if whole.ndim == 1 and not whole.requires_grad:
            self._whole, self._piece = weakref.ref(whole), weakref.ref(piece)
            self._size, self._length = len(whole), len(piece)
        return piece


def _nothing() -> None:
    """A weak reference to nothing."""


def _chunk(whole: Any, count: int) -> tuple[Any, ...]:
    """``whole`` in ``count`` equal pieces: one of them, as often."""
    if whole.ndim != 1 or whole.requires_grad or not len(whole) or len(whole) % count:
        return torch.chunk(whole, count)
    return (whole.narrow(0, 0, len(whole) // count),) * count


def _join(pieces: Any) -> Any:
    """``cat`` of one operand that is as long as all pieces: what is read and written is equal."""
    distinct = {id(p): p for p in pieces}
    alike = {(p.ndim, p.dtype, p.device, p.requires_grad) for p in distinct.values()}
    lengths = {key: p.numel() for key, p in distinct.items()}
    some = next((distinct[key] for key, length in lengths.items() if length), None)
    if some is None or len(alike) > 1 or some.ndim != 1 or some.requires_grad:
        return torch.cat(pieces)
    return torch.cat([some[:1].expand(sum(lengths[id(p)] for p in pieces))])


@contextlib.contextmanager
def first_pieces() -> Iterator[None]:
    """Of frozen weights, whose bytes a run sums piece by piece, the first piece of one of each
    shape: the others take the same memory anew, one after the other, and of a large model they are
    most of a trace's operations."""
    summed, checksum = set(), frozen.checksum

    def first(flat: torch.Tensor) -> tuple[torch.Tensor]:
        return (flat[: frozen.PIECE],)

    def once(tensor: torch.Tensor) -> int:
        kind = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if kind in summed:
            return 0
        summed.add(kind)
        return checksum(tensor)

    with mock.patch.object(frozen, "pieces", first), mock.patch.object(frozen, "checksum", once):
        yield


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
