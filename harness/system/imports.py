"""What one fork of a process imported, imported in the process itself for the forks that follow.

A fork imports torch's compiler with its first optimizer, and what DeepSpeed and accelerate put off
until they are used: one to three seconds, again in each.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Collection, Iterable

__all__ = ["imported", "keep", "load"]


def load(names: Iterable[str]) -> None:
    """Import what can be imported of ``names``, and keep collections away from what lives then:
    each fork's would read all of it anew, and write to its pages, and so copy them."""
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    keep()


def keep() -> None:
    """Keep collections away from what lives now."""
    gc.collect()
    gc.freeze()


def imported(before: Collection[str]) -> list[str]:
    """Modules that are here and were not ``before``, in the order of their import."""
    own = ("__", "tests.")
    return [name for name in sys.modules if name not in before and not name.startswith(own)]
