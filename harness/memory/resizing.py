"""Storages that change their size under tensors that stay: a library so lets go of memory and takes
it again, and no op tells (FSDP2 does it with gathered weights)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

__all__ = ["watched"]


@contextlib.contextmanager
def watched(noticed: Callable[[Any], None]) -> Iterator[None]:
    """While it lasts, ``noticed`` is called with each storage that was resized."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, size: int) -> Any:
        done = resize(storage, size)
        noticed(storage)
        return done

    with mock.patch.object(torch.UntypedStorage, "resize_", resized):
        yield
