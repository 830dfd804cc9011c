"""JSON files: atomic writes, and reads that check and rebuild the original types. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import secrets
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import IO, Any

from strategies.files import DEEPEST, bounded_memory, printable, read_foreign

BEYOND = 10**19
"""Bound above every integer that is read: 2**63 - 1 has 19 digits."""


class BadFile(ValueError):
    """A JSON file that cannot be used; the message names the file and the fault."""


def read_json(
    path: Path | str, kind: Any = Any, *, name: str = "it", schema: int = 0, beyond: int = BEYOND
) -> Any:
    """Read a JSON file from an untrusted source; its text is made printable.

    ``build`` checks it against ``kind``, and calls it ``name``. ``schema`` is the required value of
    its field of that name (0: it has none); ``beyond`` bounds every integer. A BadFile says why it
    is unreadable, out of bounds (``strategies.files``), or of another schema or type.
    """
    try:
        with bounded_memory():
            data = _decode(read_foreign(path), beyond)
        found = data.get("schema") if isinstance(data, dict) else None
        if schema and found is None:
            raise ValueError(f"not a {name} file (no schema)")
        if schema and found != schema:
            raise ValueError(f"schema {found!r:.60}, this version reads {schema}")
        return data if kind is Any else build(kind, data, name)
    except OSError as error:
        raise BadFile(printable(f"{path}: {error.strerror or error}")) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadFile(printable(f"{path}: {error}")) from None


def _decode(text: str, beyond: int) -> Any:
    try:
        data = json.loads(text, parse_float=_number)
    except RecursionError:
        raise ValueError("unreadable as JSON (nested too deep)") from None
    except ValueError as error:
        raise ValueError(f"unreadable as JSON ({error})") from None
    return _plain_data(data, 1, beyond)


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.20} is beyond a float's range")
    return value


def _plain_data(data: Any, depth: int, beyond: int) -> Any:
    """Return ``data`` with its text made printable, within the bounds of ``read_json``."""
    kind = type(data)
    if kind is str:
        return _text(data)
    if kind is int and not -beyond < data < beyond:
        raise ValueError(f"an integer of {len(str(abs(data)))} digits")
    if kind not in (dict, list):
        return data
    if depth > DEEPEST:
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    if kind is list:
        return [_plain_data(item, depth + 1, beyond) for item in data]
    return {_text(key): _plain_data(value, depth + 1, beyond) for key, value in data.items()}


def _text(text: str) -> str:
    """Return ``text`` made printable; raise for a lone surrogate, which no valid file has.

    Equal texts become one object: the files of a set repeat most of their text.
    """
    if text.isascii() and text.isprintable():
        return sys.intern(text)
    text.encode("utf-8")
    return sys.intern(printable(text))


def write_json(path: Path, data: Any, *, durable: bool = True) -> None:
    """Write ``data`` as JSON to ``path``, atomically; ``durable`` survives a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path, durable=durable) as stream:
        json.dump(data, stream, indent=1, default=plain)
        stream.write("\n")


@contextlib.contextmanager
def atomic_file(path: Path, *, durable: bool = False) -> Iterator[IO[str]]:
    """Open a temporary text file that replaces ``path``, or a link there, at the end."""
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}")
    # tempfile creates files with mode 0600, but the user's umask should decide.
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


def plain(value: Any) -> Any:
    """Return plain data for numbers of array libraries, paths and similar values."""
    if hasattr(value, "item"):
        return value.item()
    return str(value)


def build(kind: Any, data: Any, where: str) -> Any:
    """Build a ``kind`` from plain ``data``: checked dataclasses, enums, lists, dicts, optionals.

    Raises:
        ValueError: a value has the wrong type; names the field, below ``where``.
    """
    if type(data) is kind or kind is Any:
        return data
    origin, arguments = _parts(kind)
    if origin in (typing.Union, types.UnionType):
        some = next(a for a in arguments if a is not type(None))
        return None if data is None and type(None) in arguments else build(some, data, where)
    if dataclasses.is_dataclass(kind):
        return _record(kind, data, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    if origin in (list, tuple, Sequence):
        _expect(isinstance(data, (list, tuple)), "a list", data, where)
        item = arguments[0]
        if not all(type(value) is item for value in data):  # a large set has millions of numbers
            data = [build(item, value, f"{where}[{place}]") for place, value in enumerate(data)]
        return tuple(data) if origin is tuple else list(data)
    if origin in (dict, Mapping):
        _expect(isinstance(data, dict), "a mapping", data, where)
        return {k: build(arguments[1], value, f"{where}.{k}") for k, value in data.items()}
    if kind is float and type(data) is int:
        return float(data)
    _expect(isinstance(data, kind) and isinstance(data, bool) <= (kind is bool), kind, data, where)
    return data


def _record(kind: Any, data: Any, where: str) -> Any:
    """Build a dataclass. Its ``ENDED`` names fields that older files have, which are skipped."""
    _expect(isinstance(data, dict), "a mapping", data, where)
    hints, ended = _hints(kind), getattr(kind, "ENDED", ())
    data = {name: value for name, value in data.items() if name not in ended}
    if unknown := data.keys() - hints.keys():
        raise ValueError(f"{where}: unknown field {min(unknown)!r}")
    fields = {name: build(hints[name], value, f"{where}.{name}") for name, value in data.items()}
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


_hints = functools.cache(typing.get_type_hints)


@functools.cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


def _expect(fact: bool, wanted: Any, data: Any, where: str) -> None:
    if not fact:
        name = getattr(wanted, "__name__", wanted)
        raise ValueError(f"{where} should be {name}, not {data!r:.60}")
