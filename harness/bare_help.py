"""Show a command's help on a Python that lacks numpy, rich or PyYAML: for a machine without set-up.

Commands import these packages above and use them only when they run. Help needs their names alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

PACKAGES = ("numpy", "rich", "yaml")
"""The packages that commands import above; ``run.sh`` (READS) needs the same."""


class _Names(type):
    """Attributes of a placeholder: placeholders, and no protocol's method."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _Placeholder(metaclass=_Names):
    """Replaces any class, function or value of a missing package: can be called and derived from,
    and is empty."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module of placeholders for each module of PACKAGES that nothing else finds."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: getattr(_Placeholder, name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def main(words: Sequence[str]) -> int:
    """Print the help or the version that ``words`` ask for; returns the exit code."""
    sys.meta_path.append(_Finder())
    from harness import cli

    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
