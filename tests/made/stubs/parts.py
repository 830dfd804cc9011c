"""What several stubs are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strategies.strategy import Strategy

Table = dict[str, tuple[str, type[Strategy], str, Callable[..., Any]]]
"""What happened instead -> (recipe, strategy, the stage that is stubbed, the stub)."""


def nothing(*_: Any, **__: Any) -> None:
    """A stage that does nothing."""
