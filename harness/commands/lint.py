"""``./run.sh lint``: check launch files as their libraries do, and report DeepSpeed settings that
waste memory for a model. Needs no torch."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from harness.commands.console import FAILED, OK, make_console
from harness.commands.options import add_json, write_answer
from harness.json_files import BadFile, read_json
from harness.resolve import resolve
from harness.spec import Spec, SpecError, model_name
from harness.subjects import kind_of
from harness.subjects.library import families
from strategies import CATALOG, users_launch
from strategies.base import BadInput
from strategies.engines.zero.waste import Finding, Job, waste
from strategies.launch_file import FOLDER
from strategies.subject import Shaping
from strategies.words import name_of

DEVICES = 8
"""Usual number of devices."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lint``."""
    add = parser.add_argument
    add(
        "files",
        nargs="*",
        metavar="FILE",
        help="DeepSpeed JSON or accelerate files (default: the JSON in launch_configs)",
    )
    text = "a preset or FILE.py:CLASS (default: DiT-XL/2)"
    add("--model", type=families.canonical, metavar="MODEL", default="DiT-XL/2", help=text)
    text = "devices (default: 8; the batch of a file is compared with it only if it is given)"
    add("--processes", type=int, metavar="N", help=text)
    text = "type of the computation (default: bf16)"
    add(
        "--precision",
        type=lambda word: name_of(word, CATALOG),
        choices=("bf16", "fp32"),
        default="bf16",
        help=text,
    )
    add_json(parser)


def lint_files(options: argparse.Namespace) -> int:
    """Print each file's wasteful settings; return 1 if any wastes."""
    console = make_console()
    paths = [Path(name) for name in options.files] or own_files()
    devices = options.processes or DEVICES
    spec = lint_spec(options.model, devices, options.precision)
    passed = {path: checked(path, options.processes)[1] for path in paths}
    wastes = {path: findings(path, spec) for path in paths}
    console.print(f"{options.model} in {options.precision} on {devices} devices", highlight=False)
    for path, of_file in wastes.items():
        own = path.parent == FOLDER
        _tell(path, [*([] if own else passed[path]), *of_file], console)
    rows = [
        {
            "file": path,
            "passed_over": passed[path],
            "wastes": [*map(dataclasses.asdict, of_file)],
        }
        for path, of_file in wastes.items()
    ]
    write_answer(options, {"model": options.model, "processes": devices, "rows": rows})
    wrong = any(keys for path, keys in passed.items() if path.parent != FOLDER)
    return FAILED if wrong or any(wastes.values()) else OK


def lint_spec(model: str, processes: int, precision: str = "bf16") -> Spec:
    """Return a run of the sizes to check. It has one sample per device: no rule reads the batch."""
    return Spec(
        recipe=f"zero3+{precision}",
        model=model_name(model),
        objective=kind_of(model_name(model)).usual_objective(Shaping(), model),
        processes=processes,
        global_batch=processes,
        data="synthetic",
    )


def own_files() -> list[Path]:
    """Return the DeepSpeed JSON files of this project."""
    return sorted(FOLDER.glob("*.json"))


def findings(path: Path, spec: Spec) -> list[Finding]:
    """Return the wasteful settings of the file at ``path``.

    Raises:
        SpecError: the file is no readable DeepSpeed JSON; names the file and a remedy.
    """
    zero = checked(path)[0]
    return waste(zero, _job(spec)) if zero.get("stage") else []


def _job(spec: Spec) -> Job:
    resolved = resolve(spec)
    itemsize = 2 if "half_compute" in resolved.launch.traits else 4
    return Job(sizes=resolved.subject.sizes, itemsize=itemsize, ranks=spec.processes)


@functools.lru_cache
def checked(path: Path, processes: int | None = None) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Return a launch file's zero_optimization block, and the keys that its library passes over.

    Raises:
        SpecError: the file is unreadable, or its library refuses it; names every fault.
    """
    try:
        if path.suffix == ".json":
            data = read_json(path)
            if not isinstance(data, dict) or not {"zero_optimization", "distributed_type"} & {
                *data
            }:
                raise BadFile(f"{path}: no zero_optimization block")
        file, passed = users_launch.read(path, processes)
    except BadFile as error:
        raise SpecError(f"{error}; name a DeepSpeed JSON file") from None
    except BadInput as error:
        raise SpecError(str(error)) from None
    return file.settings.get("zero_optimization", {}), passed


def _tell(path: Path, wasted: list[Finding | str], console: Console) -> None:
    lines = [] if wasted else [f"[green]ok[/green]  {escape(path.name)}"]
    lines += [f"[yellow]--[/yellow]  {escape(f'{path.name}: {finding}')}" for finding in wasted]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
