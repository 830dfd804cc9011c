"""JSON files: written atomically, and read back as the types that they were written from.

Nothing here imports torch: what a process leaves behind is read on any machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import secrets
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import IO, Any

from strategies.files import DEEPEST, bounded_text, nested, printable

__all__ = ["BadFile", "build", "read_json", "whole", "write_json"]

DIGITS = 19
"""Of the longest integer: 2**63 - 1 has so many."""


class BadFile(ValueError):
    """A JSON file that cannot be used; the message names the file and the fault."""


def read_json(path: Path | str, kind: Any = Any, *, name: str = "it", schema: int = 0) -> Any:
    """Read a JSON file that someone else may have written.

    Text in it comes back printable (``strategies.files.printable``).

    Args:
        kind: the type that the file holds, checked by ``build``.
        name: what the file is called in a message about one of its fields.
        schema: the number that its field ``schema`` must have; 0: it has none.

    Raises:
        BadFile: it cannot be opened, is no regular file, is larger than ``LARGEST``, is not JSON,
            nests deeper than ``DEEPEST`` levels, has a number that no measurement has, is of
            another schema or not of that type.
    """
    try:
        data = _decode(bounded_text(path))
        if schema and (not isinstance(data, dict) or data.get("schema") != schema):
            raise ValueError(_other_schema(data, name, schema))
        return data if kind is Any else build(kind, data, name)
    except OSError as error:
        raise BadFile(printable(f"{path}: {error.strerror or error}")) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadFile(printable(f"{path}: {error}")) from None


def _other_schema(data: Any, name: str, schema: int) -> str:
    if not isinstance(data, dict) or "schema" not in data:
        return f"not a {name} file (no schema)"
    return f"schema {data['schema']!r:.60}, this version reads {schema}"


def _decode(text: str) -> Any:
    try:
        data = json.loads(text, parse_int=_integer, parse_float=_number)
    except RecursionError:
        raise ValueError("unreadable as JSON (nested too deep)") from None
    except ValueError as error:
        raise ValueError(f"unreadable as JSON ({error})") from None
    if any(depth > DEEPEST for value, depth in nested(data) if isinstance(value, (dict, list))):
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    return _printable(data)


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.20} is beyond a float's range")
    return value


def _printable(data: Any) -> Any:
    """``data`` with its text made printable; a lone surrogate is an error, as no file has one."""
    if isinstance(data, str):
        data.encode("utf-8")
        return data if data.isprintable() else printable(data)
    if isinstance(data, dict):
        return {_printable(key): _printable(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_printable(item) if isinstance(item, (str, dict, list)) else item for item in data]
    return data


def write_json(path: Path, data: Any, *, durable: bool = True) -> None:
    """Write ``data`` as JSON beside ``path``, then move it into place.

    ``durable`` flushes it to disk first, so that not even a power cut leaves half a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path, durable=durable) as stream:
        json.dump(data, stream, indent=1, default=_plain)
        stream.write("\n")


@contextlib.contextmanager
def whole(path: Path, *, durable: bool = False) -> Iterator[IO[str]]:
    """Open a text file beside ``path``, which takes its place at the end.

    A reader never sees half of it; a link at ``path`` is replaced, not followed. Bytes of file
    names that are no text are written as escapes.
    """
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}")
    # Not tempfile's: its files are 0600, and the user's umask is to decide.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            yield stream
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _plain(value: Any) -> Any:
    """Numbers of array libraries and the like, as plain data."""
    if hasattr(value, "item"):
        return value.item()
    return str(value)


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
    if origin in (list, tuple, Sequence):
        _expect(isinstance(data, (list, tuple)), where, "a list", data)
        made = tuple if origin is tuple else list
        return made(build(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin in (dict, Mapping):
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
    hints = _hints(kind)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise ValueError(f"{where}: unknown field {unknown[0]!r}")
    try:
        return kind(
            **{key: build(hints[key], item, f"{where}.{key}") for key, item in data.items()}
        )
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


_hints = functools.cache(typing.get_type_hints)


def _expect(fact: bool, where: str, wanted: Any, data: Any) -> None:
    if not fact:
        name = getattr(wanted, "__name__", wanted)
        raise ValueError(f"{where} should be {name}, not {data!r:.60}")
