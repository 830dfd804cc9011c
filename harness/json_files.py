"""JSON files: atomic writes, and reads that check and rebuild the original types.

This module does not import torch, so results can be read on any machine.
"""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Read a JSON file from an untrusted source.

    Its text is made printable (``strategies.files.printable``).

    Args:
        kind: the type that the file holds, checked by ``build``.
        name: the file's name in a message about one of its fields.
        schema: the required value of its field ``schema``; 0 if the file has no schema.
        beyond: the bound above every integer.

    Raises:
        BadFile: it cannot be opened, is no regular file, is larger than ``LARGEST``, is not JSON,
            takes more than ``MOST_MEMORY``, nests deeper than ``DEEPEST`` levels, has a number out
            of range, or has another schema or type.
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

    Equal texts become one object, because the files of a set repeat most of their text.
    """
    if text.isascii() and text.isprintable():
        return sys.intern(text)
    text.encode("utf-8")
    return sys.intern(printable(text))


def write_json(path: Path, data: Any, *, durable: bool = True) -> None:
    """Write ``data`` as JSON to a temporary file, then rename it to ``path``.

    ``durable`` flushes it to disk first, so that a power cut cannot leave a partial file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path, durable=durable) as stream:
        json.dump(data, stream, indent=1, default=plain)
        stream.write("\n")


@contextlib.contextmanager
def whole(path: Path, *, durable: bool = False) -> Iterator[IO[str]]:
    """Open a temporary text file that replaces ``path`` at the end.

    A reader never sees a partial file. A link at ``path`` is replaced, not followed. Bytes of file
    names that are not text are written as escapes.
    """
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
    """Build a ``kind`` from plain ``data``: checked dataclasses, enums, lists, dicts, optional
    values.

    Raises:
        ValueError: a value has the wrong type; names the field, below ``where``.
    """
    try:
        return _reader(kind)(data)
    except _Misfit as misfit:
        raise ValueError(f"{where}{''.join(reversed(misfit.path))}{misfit}") from None


class _Misfit(Exception):
    """A value with the wrong type for its field; ``path`` is the path to it, last step first."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.path: list[str] = []


Reader = Callable[[Any], Any]
"""Converts plain data to one type; raises ``_Misfit``."""


@functools.cache
def _reader(kind: Any) -> Reader:
    """Return the reader of a type. It is cached: a large set has millions of values."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        some = _reader(next(a for a in arguments if a is not type(None)))
        empty = type(None) in arguments
        return lambda data: None if empty and data is None else some(data)
    if dataclasses.is_dataclass(kind):
        return _record(kind)
    if kind is Any:
        return lambda data: data
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if origin in (list, tuple, Sequence):
        return _items(_reader(arguments[0]), tuple if origin is tuple else list)
    if origin in (dict, Mapping):
        item = _reader(arguments[1])
        return lambda data: _fields(data, lambda key: item)

    def scalar(data: Any) -> Any:
        if type(data) is kind:
            return data
        if kind is float and isinstance(data, int):
            return float(data)
        _expect(isinstance(data, kind) and not isinstance(data, bool), kind, data)
        return data

    return scalar


def _items(item: Reader, made: type) -> Reader:
    def read(data: Any) -> Any:
        _expect(isinstance(data, (list, tuple)), "a list", data)
        found: list[Any] = []
        try:
            for value in data:
                found.append(item(value))
        except _Misfit as misfit:
            misfit.path.append(f"[{len(found)}]")
            raise
        return found if made is list else made(found)

    return read


def _record(kind: Any) -> Reader:
    """Return the reader of a dataclass.

    Its ``ENDED`` names fields that older files have, which are skipped.
    """
    ended = frozenset(getattr(kind, "ENDED", ()))

    @functools.cache  # built at the first read: a dataclass may contain its own type
    def readers() -> dict[str, Reader]:
        return {name: _reader(hint) for name, hint in typing.get_type_hints(kind).items()}

    def read(data: Any) -> Any:
        _expect(isinstance(data, dict), "a mapping", data)
        data = {name: value for name, value in data.items() if name not in ended}
        if unknown := data.keys() - readers().keys():
            raise _Misfit(f": unknown field {min(unknown)!r}")
        fields = _fields(data, readers().__getitem__)
        try:
            return kind(**fields)
        except TypeError as error:
            raise _Misfit(f": {error}") from None

    return read


def _fields(data: Any, reader_of: Callable[[str], Reader]) -> dict[str, Any]:
    _expect(isinstance(data, dict), "a mapping", data)
    found, key = {}, ""
    try:
        for key, value in data.items():
            found[key] = reader_of(key)(value)
    except _Misfit as misfit:
        misfit.path.append(f".{key}")
        raise
    return found


def _expect(fact: bool, wanted: Any, data: Any) -> None:
    if not fact:
        name = getattr(wanted, "__name__", wanted)
        raise _Misfit(f" should be {name}, not {data!r:.60}")
