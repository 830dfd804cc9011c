"""JSON files: written atomically, and read back as the types that they were written from.

Nothing here imports torch: what a process leaves behind is read on any machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

__all__ = ["build", "deeper_than", "write_json"]


def write_json(path: Path, data: Any, *, durable: bool = True) -> None:
    """Write ``data`` as JSON beside ``path``, then move it into place.

    ``durable`` flushes it to disk first, so that not even a power cut leaves half a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would keep colleagues from reading
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(data, stream, indent=1, default=_plain)
            stream.write("\n")
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _plain(value: Any) -> Any:
    """Numbers of array libraries and the like, as plain data."""
    if hasattr(value, "item"):
        return value.item()
    return str(value)


def deeper_than(levels: int, data: Any) -> bool:
    """Whether lists and mappings in ``data`` nest deeper; by a list of its own, not by recursion,
    which such data would exhaust here or in whoever walks it next."""
    waiting = [(data, 1)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, (dict, list)):
            if depth > levels:
                return True
            inner = value.values() if isinstance(value, dict) else value
            waiting += [(item, depth + 1) for item in inner if isinstance(item, (dict, list))]
    return False


def build(kind: Any, data: Any, where: str) -> Any:
    """``data`` as ``kind``: dataclasses, enums, lists, dicts and optional values, checked."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        return build(next(a for a in arguments if a is not type(None)), data, where)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, data, where)
    if kind is Any:
        return data
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    if origin is list or origin is tuple:
        _expect(isinstance(data, (list, tuple)), where, "a list", data)
        return origin(build(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is dict:
        _expect(isinstance(data, dict), where, "a mapping", data)
        return {key: build(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if kind is float and isinstance(data, int):
        return float(data)
    _expect(
        isinstance(data, kind) and (kind is bool or not isinstance(data, bool)), where, kind, data
    )
    return data


def _build_dataclass(kind: Any, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), where, "a mapping", data)
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise ValueError(f"{where}: unknown field {unknown[0]!r}")
    try:
        return kind(
            **{key: build(hints[key], item, f"{where}.{key}") for key, item in data.items()}
        )
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


def _expect(fact: bool, where: str, wanted: Any, data: Any) -> None:
    if not fact:
        name = getattr(wanted, "__name__", wanted)
        raise ValueError(f"{where} should be {name}, not {data!r:.60}")
