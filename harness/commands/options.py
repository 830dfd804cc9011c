"""Options that several commands share: the fields of a spec, and checks of their values."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness import files
from harness.json_files import plain, write_json
from harness.spec import DEVICES, OF_MODEL, Spec, SpecError, add_arguments, located
from harness.subjects import kind_of, usual_objective
from harness.subjects.library import families
from strategies.subject import Subject

OF_SAMPLING = ("workload", "weights", "sampler_steps", "cfg_scale")
"""Spec fields without an option in commands that only train."""
OF_PLANS = ("before", "phases")
"""Spec fields that define a prediction and have no meaning in a run."""
ALL_GPUS = "all GPUs, else 1"
"""Default number of processes of a one-recipe command, for the help."""


def add_settings(
    parser: Any, *leave_out: str, defaults: Mapping[str, Any] | None = None, sampling: bool = False
) -> None:
    """Add an option for each field of a spec except ``leave_out``; ``parser`` may be a group.

    ``defaults`` are the command's own, for the help. ``sampling``: it can draw samples.
    """
    leave_out += OF_PLANS if sampling else (*OF_PLANS, *OF_SAMPLING)
    parser.add_argument("--device", choices=DEVICES, help="cpu or cuda (default: cuda if there)")
    add_arguments(parser, leave_out=(*leave_out, "device", "nodes"), defaults=defaults)


def add_shaping(parser: Any) -> None:
    """Add the options that shape a public model, except its resolution."""
    for f in dataclasses.fields(Spec):
        if f.name in ("config", "set", "frames", "text"):
            text = f"{f.metadata['help']} (default: {OF_MODEL})"
            parser.add_argument(f"--{f.name}", type=type(f.default), default=f.default, help=text)


def overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Return the spec fields given on the command line, except recipe and device."""
    names = [f.name for f in dataclasses.fields(Spec) if f.name not in ("recipe", "device")]
    asked = {name: getattr(options, name, None) for name in names}
    given = located({name: value for name, value in asked.items() if value is not None})
    if "model" in given:
        given["model"] = families.canonical(given["model"])
    kind = kind_of(given["model"]) if "model" in given else Subject
    if kind.brings_samples:  # it trains on its own samples only, so that is the default
        usual = usual_objective(given["model"], given.get("config", ""))
        return {"data": "synthetic", "objective": usual} | given
    return given


def seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def folder_name(text: str) -> Path:
    """Parse a folder, for argparse. An unset variable would give an empty name."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the folder's name is empty; give a name")
    return Path(text)


def add_force(parser: Any) -> None:
    text = "also replace files that Headroom did not write (default: refuse, and name the file)"
    parser.add_argument("--force", action="store_true", help=text)


SCHEMA = 1
"""Version of the answers of ``--json``; a field that ends or changes its meaning raises it."""


def add_json(parser: Any) -> None:
    """Add ``--json``, whose answer the command gives to ``write_answer``."""
    text = "write the answer as JSON too; -: to standard output, with the text on standard error "
    parser.add_argument("--json", type=Path, metavar="FILE", help=text + "(default: not written)")


@contextlib.contextmanager
def answering(options: argparse.Namespace) -> Iterator[None]:
    """Check that the answer of ``--json`` can be written; for ``-``, keep text off stdout."""
    path, options.stdout = getattr(options, "json", None), sys.stdout
    if path and str(path) == "-":
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    if path:
        check_file(path, "json", force=getattr(options, "force", False))
    yield


def write_answer(options: argparse.Namespace, answer: Mapping[str, Any]) -> None:
    """Write a command's answer to the file of ``--json``, if it is given."""
    if options.json is None:
        return
    data = {"schema": SCHEMA, "command": options.command, **answer}
    if str(options.json) == "-":
        print(json.dumps(data, indent=1, default=plain), file=options.stdout)
    else:
        write_json(options.json, data)


def check_file(path: Path, name: str, *, force: bool = False) -> None:
    """Check, before hours of work, that a file can be written for option ``name``; claim it."""
    path = path.absolute()
    why = "it is a folder" if path.is_dir() else ""
    try:
        if not why:
            files.claim_file(path, force=force)
    except OSError as error:
        why = f"cannot write to {path.parent} ({error.strerror or error})"
    if why:
        raise SpecError(f"{name} is {path}: {why}; give another --{name} FILE")
