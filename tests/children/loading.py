"""Modules that one fork imported, imported in its parent for the forks that follow."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterable

__all__ = ["imported", "load"]


def load(names: Iterable[str]) -> None:
    """Import what there is of ``names``, and let collections pass over it: a fork's would write to
    all pages that hold objects of libraries."""
    for name in names:
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def imported(before: Iterable[str]) -> list[str]:
    """Modules of libraries that are here and were not ``before``, in the order of their import."""
    known = set(before)
    ours = ("__", "tests.", "harness.")
    return [name for name in sys.modules if name not in known and not name.startswith(ours)]
