"""The ways in which attention sees the tokens of other ranks, as a recipe names them; no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.engine import Launch

__all__ = ["NAMES", "kind", "ring_refused", "traits"]

NAMES = ("ulysses", "gather", "ring")
TRAITS = {"gather": "cut_queries", "ring": "flash_alone"}


def traits(how: str) -> frozenset[str]:
    """What others may have to know of it."""
    return frozenset({TRAITS[how]} if how in TRAITS else ())


def ring_refused(launch: Launch) -> str | None:
    """Why a ring cannot run under ``launch``, and the way out."""
    if "compiled" in launch.traits:
        return "a ring inside a graph has not been tried; leave compile out, or take how=gather"
    if launch.device == "cuda" and "half_compute" not in launch.traits:
        return "its kernel takes 16 bits on GPUs; add bf16, or take how=gather"
    return launch.subject.lacks("attend", "take how=ulysses or how=gather")


def kind(how: str, ranks: int) -> Any:
    """The kind of ``exchanges.Around`` that makes of attention one that sees the tokens of so many
    ranks."""
    from strategies.parallel.sequence import exchanges, ring

    if how == "ring":
        return ring.of(ranks)
    return exchanges.Ulysses if how == "ulysses" else exchanges.Gathered
