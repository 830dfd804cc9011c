"""Show a command's help on a Python without numpy, rich or PyYAML, before any set-up.

Commands import these packages at module level but use them only when they run. Help needs only
their names, so placeholders replace them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

PACKAGES = ("numpy", "rich", "yaml")
"""Packages that commands import at module level; READS in ``run.sh`` must list the same."""


class _Names(type):
    """Metaclass that returns placeholders for all attributes except dunder methods."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _Placeholder(metaclass=_Names):
    """Placeholder for anything in a missing package: callable, subclassable and empty."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder that supplies placeholders for modules of PACKAGES that are not installed."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        vars(module)["__getattr__"] = lambda name: getattr(_Placeholder, name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def main(words: Sequence[str]) -> int:
    """Print the help or version requested by ``words``; return the exit code."""
    sys.meta_path.append(_Finder())
    from harness import cli

    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
