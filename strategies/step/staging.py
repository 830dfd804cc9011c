"""Tensors of a GPU read by the host, piece by piece, through pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Staging"]


class Staging:
    """Two buffers of pinned host memory, filled in turns on a stream of their own: while the host
    works on one piece the next is on its way. A copy to memory that is not pinned would hold up
    both, and goes through a small buffer of the driver's besides.

    In a prediction, where the device has no streams, pieces are copied as they are asked for.

    Args:
        device: where the tensors are.
        dtype: their type.
        elements: of a piece; a power of two, for the allocator rounds pinned blocks up to one.
    """

    def __init__(self, device: Any, dtype: Any, elements: int) -> None:
        import torch

        cuda = device.type == "cuda"
        self.elements = elements
        self.buffers = [torch.empty(elements, dtype=dtype, pin_memory=cuda) for _ in range(2)]
        self.stream = torch.cuda.Stream(device) if cuda else None

    def read(self, tensor: Any) -> Iterator[Any]:
        """The elements of ``tensor`` in order, flat and in pieces on the host; each is there until
        the next is asked for."""
        pieces = tensor.flatten().split(self.elements)
        coming = self.begin(0, pieces[0])
        for index, piece in enumerate(pieces):
            wait, coming = coming, None
            if index + 1 < len(pieces):
                coming = self.begin(index + 1, pieces[index + 1])
            wait()
            yield self.buffers[index % 2][: piece.numel()]

    def begin(self, index: int, piece: Any) -> Callable[[], None]:
        """Begin to copy a piece into its buffer; call the result to wait until it is there."""
        import torch

        buffer = self.buffers[index % 2][: piece.numel()]
        if self.stream is None:
            buffer.copy_(piece)
            return lambda: None
        self.stream.wait_stream(torch.cuda.current_stream(piece.device))
        with torch.cuda.stream(self.stream):
            buffer.copy_(piece, non_blocking=True)
        return self.stream.record_event().synchronize
