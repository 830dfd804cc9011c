"""The reader of foreign files, and their text: bounded reads, plain YAML, text safe to print.

Everything that the project did not write in this run is foreign: ``read_foreign`` reads text,
``open_foreign`` opens what a library parses, and ``bounded_memory`` stands around the parser.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import re
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

try:
    import resource
except ImportError:  # Windows limits no process's memory so
    resource = None  # type: ignore[assignment]

DEEPEST = 40
"""Levels of lists and mappings that a file may nest; a result has about ten."""

LARGEST = 16 * 2**20
"""Bytes of the largest text file that is read; a result of 64 ranks has about 2 MiB."""
LARGEST_CONFIG = 128 * 2**10
"""Bytes of the largest YAML, TOML or shell file; one has some thousand. Their parsers are slow."""
MOST_MEMORY = 640 * 2**20
"""Bytes that reading one file may take."""
SEQUENCE = re.compile(
    "\x1b\\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor, clear screen
    "|\x1b[\\]PX^_].*?(?:\x07|\x1b\\\\|$)"  # OSC, DCS and other strings, up to their end
    "|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"  # controls, and text direction
)


def open_foreign(path: Path | str) -> io.FileIO:
    """Open a regular file for reading, unbuffered.

    Raises:
        OSError: it cannot be opened.
        ValueError: a device, pipe or folder.
    """
    # Without O_NONBLOCK, opening a pipe that has no writer would never return. Windows has no such
    # flag, and needs O_BINARY, which others lack.
    flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, os.O_RDONLY | flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError("it is no regular file")
    return os.fdopen(handle, "rb", buffering=0)


def read_foreign(path: Path | str, limit: int = LARGEST) -> str:
    """Return the UTF-8 text of a regular file.

    Raises:
        OSError: it cannot be opened.
        ValueError: a device, pipe or folder; more than ``limit`` bytes; not UTF-8.
    """
    with open_foreign(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > limit else io.BufferedReader(file).read(limit + 1)
    if max(size, len(data)) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return data.decode("utf-8")


_MEMORY_LOCK = threading.Lock()
_memory_limits: list[tuple[int, int]] = []
"""The process's own limit, once for each ``bounded_memory`` that is open."""


@contextlib.contextmanager
def bounded_memory(most: int = MOST_MEMORY) -> Iterator[None]:
    """Let this process allocate at most ``most`` further bytes in this context, where Linux can.

    A parser of a hostile file then fails at once, and not when the machine has no memory left.

    Raises:
        ValueError: it needed more.
    """
    if resource is None:
        yield
        return
    with _MEMORY_LOCK:
        own = resource.getrlimit(resource.RLIMIT_AS)
        _memory_limits.append(_memory_limits[0] if _memory_limits else own)
        _limit_memory(most, own)
    try:
        yield
    except MemoryError:
        raise ValueError(f"it takes more than {most // 2**20} MiB of memory to read") from None
    finally:
        with _MEMORY_LOCK:
            first = _memory_limits.pop()
            if not _memory_limits:
                resource.setrlimit(resource.RLIMIT_AS, first)


def _limit_memory(most: int, own: tuple[int, int]) -> None:
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():  # its threads may reserve address space at any time
        return
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        wanted, (soft, hard) = pages * resource.getpagesize() + most, own
        if soft == resource.RLIM_INFINITY or wanted < soft:
            resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def printable(text: str) -> str:
    """Return ``text`` without terminal sequences; each other control character reads ``?``.

    Line feeds and tabs stay. Source: ECMA-48, sections 5.4 and 5.6.
    """
    return SEQUENCE.sub(lambda found: "" if found[0][0] == "\x1b" and found[0][1:] else "?", text)


def cell(value: Any) -> Any:
    """Return a value for CSV: text that a spreadsheet would take for a formula begins with ``'``.

    Source: OWASP, "CSV Injection".
    """
    if isinstance(value, str) and len(value) > 1 and value[0] in "=@+-\t\r":
        try:
            float(value)
        except ValueError:
            return f"'{value}"
    return value


class NotOurs(OSError):
    """File or folder at a path of Headroom's that another user made or linked elsewhere."""


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[int]:
    """Open a file to lock, and yield its descriptor. Its content is never touched.

    Raises:
        NotOurs: ``path`` is a symbolic link, or no regular file.
        OSError: it cannot be opened.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOurs(errno.ELOOP, "it is a symbolic link, and no lock of ours") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise NotOurs(errno.EINVAL, "it is no regular file, and no lock of ours")
        yield handle
    finally:
        os.close(handle)


def nested(data: Any) -> Iterator[tuple[Any, int]]:
    """Yield each value in lists and mappings with its level.

    It does not recurse, because deeply nested data would exhaust the stack.
    """
    waiting = [(data, 1)]
    while waiting:
        value, depth = waiting.pop()
        yield value, depth
        inner = value.values() if isinstance(value, dict) else value
        if isinstance(value, (dict, list)):
            waiting += [(item, depth + 1) for item in inner]


def own_table(path: Path) -> Any:
    """Return the data of a YAML file of the project's own, by the loader in C if there is one."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)


def parse_yaml(text: str) -> Any:
    """Return YAML as plain data: text, finite numbers, booleans, null, lists, mappings.

    Raises:
        ValueError: not YAML, an alias, a key that is no text or given twice, a tag or number that
            is no plain data, nesting deeper than ``DEEPEST``. Names the line if there is one.
    """
    try:
        with bounded_memory():
            data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"{line}not YAML ({problem})") from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    for value, depth in nested(data):
        _check_plain(value, depth)
    return data


def _check_plain(value: Any, depth: int) -> None:
    if depth > DEEPEST and isinstance(value, (dict, list)):
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no finite number")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"a whole number of {value.bit_length()} bits")
    if not isinstance(value, (str, int, float, dict, list, type(None))):
        raise ValueError(f"{value!r:.40} is a {type(value).__name__}; put text in quotes")


class _Loader(yaml.SafeLoader):
    """Safe loader that rejects duplicate keys and aliases.

    YAML itself keeps the last of two equal keys without a warning. Nested aliases expand one line
    to gigabytes, and no file here needs one.
    """

    # Dates stay text: no setting is a date.
    yaml_implicit_resolvers = {  # noqa: RUF012 (yaml's own name)
        first: [(tag, found) for tag, found in kinds if not tag.endswith(":timestamp")]
        for first, kinds in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            problem = f"alias *{event.anchor:.40}: write it out, aliases are not read"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is text", problem_mark=key.start_mark)
            if key.value in keys:
                problem = f"key {key.value!r:.40} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)
