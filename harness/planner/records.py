"""Predictions that ship with the project: a plan of a recorded training needs no trace.
``records/MODEL.jsonl.xz`` has a line for each: its name, the date, and the prediction. ``python -m
tests.refill`` adds those that are missing. No torch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import lzma
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.planner.overhead import USUAL
from harness.prediction import Prediction, read
from harness.resolve import Resolved
from harness.spec import Spec
from harness.subjects import own_module
from harness.system.probe import version
from strategies.distillation import files
from strategies.files import LARGEST, bounded_memory, open_foreign
from strategies.launch_file import LaunchFile, text_of
from strategies.launch_file import read as launch_file

TRACE = 1
"""Version of what a trace says. Whoever changes a prediction on purpose raises it, then fills the
records anew (``python -m tests.refill``): older predictions are found no more. Code, tables
and shipped model configurations count by this number alone; a changed default of a spec's field
raises it too."""
LIBRARIES = {"torch": "2.13", "diffusers": "0.42"}
"""Libraries whose minor versions are part of a prediction's name -> the version with which
the records were made, which counts where a library is missing: nothing is traced there."""
FOLDER = Path(__file__).with_name("records")
ENDING = ".jsonl.xz"


def name(row: Resolved, kind: str = USUAL) -> str:
    """Return the name of a prediction in a cache and among the records.
    It has the spec, the kind of card (``overhead.preferred``), the contents of the files that the
    row reads (launch file, model, configuration, teacher), ``TRACE`` and the libraries'
    versions."""
    place = kind if row.spec.device == "cuda" else "cpu"
    # A teacher's file by its shapes and dtypes alone, as a prediction uses nothing else of it: a
    # retrained one has the same name. A spec's own weights have the shapes of its model.
    headers = [files.header(name) for part in row.recipe.strategies for name in part.reads()]
    teachers = hashlib.sha256(b"".join(headers)).hexdigest()[:8] if headers else ""
    read_by_it = own_module.identity(row.own_model) + row.subject.identity + teachers
    launch = _launch(row.launch.engine.file)
    return "-".join(filter(None, [key(row.spec), place, read_by_it, launch, made_by()]))


def key(spec: Spec) -> str:
    """Return a short hash of the fields of ``spec`` that differ from their defaults.
    A field that ends, or a new one, leaves the keys of specs that did not set it."""
    return _hash(asked(spec))


def asked(spec: Spec) -> dict[str, Any]:
    """Return the fields of ``spec`` that differ from their defaults, by name."""
    return _differing(spec, dataclasses.asdict(spec))


@functools.cache
def made_by() -> str:
    """Return the part of a name that says what made the prediction: trace0-torch0.0-diffusers0.0.
    It has minor versions, because patches and builds trace alike."""
    versions = {one: version(one) or pinned for one, pinned in LIBRARIES.items()}
    minor = (f"{one}{'.'.join(found.split('.')[:2])}" for one, found in versions.items())
    return "-".join((f"trace{TRACE}", *minor))


def _launch(file: LaunchFile) -> str:
    """Return a short hash of the data in a launch file and in the JSON of DeepSpeed it names.
    Empty if its engine cannot use it."""
    if not file.kind:
        return ""
    if not file.own:
        return _hash([file.content, file.settings])[:6]
    content = launch_file(file.path).content
    named = (content.get("deepspeed_config") or {}).get("deepspeed_config_file")
    facts = [content, json.loads(text_of(file.path.parent.parent / named)) if named else None]
    return _hash(facts)[:6]


def _hash(facts: Any) -> str:
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _differing(record: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields in ``data`` that differ from the defaults of ``record``'s class."""
    usual = {}
    for field in dataclasses.fields(record):
        made = field.default_factory
        usual[field.name] = field.default if made is dataclasses.MISSING else made()
    return {name: value for name, value in data.items() if value != usual[name]}


OWN_LINE = re.compile(r'"((?:harness|strategies)/[\w./]+\.py):\d+"')
"""A line of the project's code, which an edit of its prose moves. Records have the file alone."""


class Record(NamedTuple):
    """A recorded prediction: the day on which it was made, its spec and kind of card, and it.
    Spec and prediction have the fields that differ from their defaults."""

    day: str
    spec: dict[str, Any]
    kind: str
    prediction: dict[str, Any]


def find(model: str, name: str) -> Prediction | None:
    """Return the recorded prediction of this name, or None."""
    line = _lines(_path(model)).get(name)
    if line is None:
        return None
    try:
        found = record_of(line)
        return dataclasses.replace(read(found.prediction), recorded=found.day)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _tell_unreadable(_path(model), error)
        return None


def lines(model: str) -> dict[str, str]:
    """Return name -> JSON of each record of a model."""
    return dict(_lines(_path(model)))


def record_of(line: str) -> Record:
    """Return the record of its JSON."""
    return Record(*json.loads(line))


def line_of(day: str, spec: Spec, kind: str, found: Prediction) -> str:
    """Return a record as JSON."""
    plain = dataclasses.replace(found, recorded="")
    record = Record(day, asked(spec), kind, _differing(plain, dataclasses.asdict(plain)))
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
    return FOLDER / f"{re.sub(r'[^A-Za-z0-9.-]', '_', model)}{ENDING}"


@functools.cache
def _lines(path: Path) -> Mapping[str, str]:
    """Return name -> JSON of each record in a file; nothing if there is no such file.
    A damaged file has no records, and one line says so."""
    if not os.path.lexists(path):
        return {}
    try:
        with open_foreign(path) as file, bounded_memory():
            reader = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            text = reader.decompress(file.read(LARGEST), LARGEST)
            if not reader.eof:
                raise ValueError(f"it is cut off, or has more than {LARGEST} bytes")
            return dict(line.split("\t", 1) for line in text.decode().splitlines())
    except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
        _tell_unreadable(path, error)
        return {}


def _tell_unreadable(path: Path, error: Exception) -> None:
    text = f"note: {path.name} is unreadable ({error!s:.80}); it counts as missing"
    print(text, file=sys.stderr)
