"""What a communication hook hands to torch's collectives, counted: bytes and types."""

from __future__ import annotations

from types import ModuleType
from typing import Any

__all__ = ["CountedCollectives"]


class CountedCollectives:
    """Stands in a module of torch's hooks for ``torch.distributed``, and counts what this rank
    hands to its collectives: what is really sent, whatever the hook says of itself."""

    def __init__(self, distributed: ModuleType) -> None:
        self.distributed, self.bytes = distributed, 0
        self.types: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.distributed, name)

    def all_reduce(self, tensor: Any, *given: Any, **more: Any) -> Any:
        """The collective, with the bytes of its input counted."""
        self._count(tensor)
        return self.distributed.all_reduce(tensor, *given, **more)

    def all_gather(self, outputs: Any, tensor: Any, *given: Any, **more: Any) -> Any:
        """The collective, with the bytes of its input counted."""
        self._count(tensor)
        return self.distributed.all_gather(outputs, tensor, *given, **more)

    def _count(self, tensor: Any) -> None:
        self.bytes += tensor.numel() * tensor.element_size()
        self.types.add(str(tensor.dtype).removeprefix("torch."))

    def forget(self) -> None:
        """Count from zero."""
        self.bytes, self.types = 0, set()
