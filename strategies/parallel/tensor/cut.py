"""Whether neighbours have parts of a run's weights, as engines ask where torch may not be there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.engine import Trained

__all__ = ["gatherer", "shape"]


def gatherer(trained: Trained) -> Any:
    """What puts such weights together (``strategies.parallel.tensor.gathering``); None where each
    rank, or all that shard them together, have them whole."""
    if trained.launch.layout.tensor == 1:
        return None
    from strategies.parallel.tensor import gathering

    return gathering


def shape(parameter: Any) -> Any:
    """The shape of what ``parameter`` is a part of; its own where it is none."""
    return parameter.share.shape if hasattr(parameter, "share") else parameter.shape
