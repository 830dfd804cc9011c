"""A launch file with every number in place, for use without Headroom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["Settled"]


class Settled(NamedTuple):
    """What an engine's launch file is, once a run of it is known (``Engine.settled``).

    ``content``: accelerate's YAML. ``files``: name -> content of each JSON that it names.
    ``blanks``: what only the user knows: "file: key" -> what to put there. ``handlers``: code of
    ``kwargs_handlers`` that ``Accelerator`` must be given, of classes that accelerate exports.
    """

    content: dict[str, Any]
    files: Mapping[str, dict[str, Any]] = {}
    blanks: Mapping[str, str] = {}
    handlers: tuple[str, ...] = ()
