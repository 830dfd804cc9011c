"""Exits of a user's code within a command, which must not end it in silence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exits_raise() -> Iterator[None]:
    """Let ``os._exit`` raise SystemExit in this process, but not in its forks.

    Otherwise a model that calls it ends a command in silence, with success if it says so.
    """
    owner, leave = os.getpid(), os._exit

    def stop(code: int) -> None:
        if os.getpid() != owner:
            leave(code)
        raise SystemExit(code)

    os._exit = stop  # type: ignore[assignment]  # it returns to nobody
    try:
        yield
    finally:
        os._exit = leave
