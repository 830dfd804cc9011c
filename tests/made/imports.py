"""Imports, read from the sources alone: what a module imports anywhere, and circles."""

from __future__ import annotations

import ast
from pathlib import Path

__all__ = ["Sources", "circle", "imported", "sources"]

ROOT = Path(__file__).resolve().parents[2]
Sources = dict[str, str]
"""Name of a module -> its text."""


def sources(package: str) -> Sources:
    texts = {}
    for path in sorted((ROOT / package.replace(".", "/")).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        texts[name] = path.read_text(encoding="utf-8")
    return texts


def imported(text: str, known: Sources) -> set[str]:
    """Modules that a text imports anywhere: in functions and for types, too."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in known else node.module for name in inside}
    return names


def circle(texts: Sources) -> list[str]:
    """Modules that import one another in a circle; empty where there is none."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        onward = sorted(imported(texts[module], texts) & set(texts))
        rounds = (walk(name, [*path, module]) for name in onward)
        found = next((round for round in rounds if round), [])
        done.add(module)
        return found

    return next((found for module in texts if (found := walk(module, []))), [])
