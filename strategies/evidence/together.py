"""Evidence that ranks give together. What one of them alone finds wrong, all must hear before they
do the next thing together: in it the others would wait for that one until the process group's time
is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from strategies.base import NotInForce, demand

if TYPE_CHECKING:
    from strategies.engine import Trained

__all__ = ["seen_by_one", "together"]

UNREAD = (AttributeError, KeyError, IndexError)
"""What a library whose names are others now makes of a look at its objects."""


def together(trained: Trained, *looks: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The facts of all ``looks``; behind each, ranks tell each other what is wrong with theirs. A
    look that communicates does so before it demands anything of its own rank.

    Raises:
        NotInForce: a rank found something wrong; every rank raises it.
    """
    facts: dict[str, Any] = {}
    for look in looks:
        found, fault = _looked(look)
        told = _everyone(trained, fault)
        demand(not any(told), _said(told))
        facts |= found
    return facts


def _said(told: list[str]) -> str:
    """Each fault once, with the first rank that found it; what all found alone."""
    if len(set(told)) == 1:
        return told[0]
    return "; ".join(f"rank {told.index(text)}: {text}" for text in dict.fromkeys(told) if text)


def _looked(look: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], str]:
    try:
        return look(), ""
    except NotInForce as error:
        return {}, str(error)
    except UNREAD as error:
        return {}, f"could not be read back ({type(error).__name__}: {error})"


def seen_by_one(trained: Trained, look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The same of one look, which has facts on some ranks alone: those of the first that has."""
    found = together(trained, look)
    return next((facts for facts in _everyone(trained, found) if facts), {})


def _everyone(trained: Trained, value: Any) -> list[Any]:
    """``value`` of every rank; of a simulated world this rank's alone."""
    import torch.distributed as dist

    if trained.accelerator.num_processes == 1 or trained.launch.simulated:
        return [value]
    told = [None] * trained.accelerator.num_processes
    dist.all_gather_object(told, value)
    return told
