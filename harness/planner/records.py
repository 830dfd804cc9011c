"""Predictions that ship with the project: a plan of a recorded training needs no trace.

``records/MODEL.jsonl.xz`` has a line for each: its name, the date, and the prediction. The name
ends in a digest of what decides a trace, so a record of other code or libraries is never found.
``python -m tests.made.recorded`` writes the files.

No torch.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import lzma
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness import ROOT
from harness.planner.adapters import adapter_of
from harness.prediction import Prediction, read
from harness.resolve import Resolved
from harness.system.probe import version

FOLDER = Path(__file__).with_name("records")
LIBRARIES = ("torch", "accelerate", "deepspeed", "diffusers", "transformers", "peft", "torchao",
             "bitsandbytes")  # fmt: skip
"""Libraries whose versions decide a trace. Builds of a version trace alike."""


# ---- Sources of a trace ----
# A recipe's trace depends on the modules that it may import: the worker, the recipe's strategies,
# its engine with the adapter, and its model, with all that they import. Other strategies are named
# as text in tables, and so not followed.


WORKER = "harness.planner.worker"
BESIDE = Path(__file__).with_name("resident_models.yaml")
PROSE = re.compile(r'^[ \t]*(?:"""(?:[^"\\]|\\.|"(?!""))*"""|#.*)[ \t]*\n', re.M)
"""A docstring or a comment, as whole lines."""
TYPES_ONLY = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+.*\n)+", re.M)
FROM = re.compile(r"^[ \t]*from ((?:harness|strategies)[\w.]*) import (\([^)]*\)|.*)", re.M)
IMPORT = re.compile(r"^[ \t]*import ((?:harness|strategies)[\w.]*)", re.M)
LAZY = re.compile(r'"((?:harness|strategies)[\w.]+):\w+"')
TABLE = "LazyTable("
"""Marks a file whose lazy names are a table, of which a recipe uses a few."""


class Source(NamedTuple):
    """A module's hash, and names that it may import; some are names of attributes."""

    hash: str
    imports: frozenset[str]


def plain(text: str) -> str:
    """Return Python code without docstrings and comment lines."""
    return PROSE.sub("", text)


@functools.cache
def _source(name: str) -> Source | None:
    """Return the source of a module or package of the project; None if there is none."""
    path = ROOT / name.replace(".", "/")
    file = next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None)
    if file is None:
        return None
    text = plain(file.read_text("utf-8"))
    return Source(hashlib.sha256(text.encode()).hexdigest(), frozenset(_imports(text)))


def _imports(text: str) -> Iterable[str]:
    code = TYPES_ONLY.sub("", text)
    for package, names in FROM.findall(code):
        yield package
        yield from (f"{package}.{name}" for name in re.findall(r"\w+", names))
    yield from IMPORT.findall(code)
    if TABLE not in code:
        yield from LAZY.findall(code)


@functools.cache
def reached(roots: frozenset[str]) -> Mapping[str, str]:
    """Return module -> hash, of ``roots`` and of all project modules that they may import."""
    found: dict[str, str] = {}
    left = set(roots)
    while left:
        name = left.pop()
        source = None if name in found else _source(name)
        if source is not None:
            found[name] = source.hash
            left |= source.imports | {name.rpartition(".")[0]} - {""}
    return found


def roots(row: Resolved) -> frozenset[str]:
    """Return the modules from which a trace of ``row`` starts."""
    engine = row.launch.engine
    used = [engine, adapter_of(engine), row.subject, *row.recipe.strategies]
    return frozenset({WORKER, *(type(one).__module__ for one in used)})


@functools.cache
def _versions() -> tuple[str, ...]:
    return tuple(str(version(name)).partition("+")[0] for name in LIBRARIES)


def digest(row: Resolved) -> str:
    """Return a short hash of what decides a trace of ``row`` beside its spec and its model's size.

    That is its launch file, the code of its sources, the sizes of models beside it, and the
    versions of libraries.
    """
    file, sources = row.launch.engine.file, sorted(reached(roots(row)).items())
    beside = BESIDE.read_text("utf-8") if row.spec.phases else ""
    facts = [_versions(), file.kind, file.content, file.settings, beside, sources]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]


# ---- Files of records ----


OWN_LINE = re.compile(r'"((?:harness|strategies)/[\w./]+\.py):\d+"')
"""A line of the project's code, which an edit of its prose moves. Records have the file alone."""


class Record(NamedTuple):
    """A recorded prediction: the day on which it was made, its spec and kind of card, and it."""

    day: str
    spec: dict[str, Any]
    kind: str
    prediction: dict[str, Any]


def find(model: str, name: str) -> Prediction | None:
    """Return the recorded prediction of this name, or None."""
    line = _lines(_path(model)).get(name)
    if line is None:
        return None
    found = record_of(line)
    return dataclasses.replace(read(found.prediction), recorded=found.day)


def lines(model: str) -> dict[str, str]:
    """Return name -> JSON of each record of a model, those of other code included."""
    return dict(_lines(_path(model)))


def record_of(line: str) -> Record:
    """Return the record of its JSON."""
    return Record(*json.loads(line))


def line_of(day: str, spec: dict[str, Any], kind: str, found: Prediction) -> str:
    """Return a record as JSON."""
    data = dataclasses.asdict(dataclasses.replace(found, seconds_taken=0.0, recorded=""))
    record = Record(day, spec, kind, data)
    return OWN_LINE.sub(r'"\1"', json.dumps(record, separators=(",", ":")))


def write(model: str, found: Mapping[str, str]) -> None:
    """Replace the records of a model by name -> JSON (``line_of``)."""
    path = _path(model)
    text = "".join(f"{name}\t{line}\n" for name, line in sorted(found.items()))
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    part.replace(path)
    _lines.cache_clear()


def _path(model: str) -> Path:
    return FOLDER / f"{re.sub(r'[^A-Za-z0-9.-]', '_', model)}.jsonl.xz"


@functools.cache
def _lines(path: Path) -> Mapping[str, str]:
    """Return name -> JSON of each record in a file; nothing if there is no such file."""
    if not path.is_file():
        return {}
    text = lzma.decompress(path.read_bytes()).decode()
    return dict(line.split("\t", 1) for line in text.splitlines())
