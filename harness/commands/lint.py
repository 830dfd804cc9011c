"""``./run.sh lint``: check launch files as their libraries do, and report DeepSpeed settings that
waste memory for a model. Needs no torch."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from harness.commands.console import FAILED, OK, make_console
from harness.commands.options import add_json, write_answer
from harness.json_files import BadFile, read_json
from harness.resolve import resolve
from harness.spec import Spec, SpecError, model_name
from harness.subjects import usual_objective
from harness.subjects.library import families
from strategies import CATALOG, users_launch
from strategies.base import BadInput
from strategies.engines.zero.waste import Finding, Job, waste
from strategies.launch_file import FOLDER
from strategies.words import name_of

DEVICES = 8
"""Usual number of devices."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "DeepSpeed JSON or accelerate files (default: the JSON in launch_configs)"
    add("files", nargs="*", metavar="FILE", help=text)
    text = "a preset or FILE.py:CLASS (default: DiT-XL/2)"
    add("--model", type=families.canonical, metavar="MODEL", default="DiT-XL/2", help=text)
    text = "devices (default: 8; the batch of a file is compared with it only if it is given)"
    add("--processes", type=int, metavar="N", help=text)
    usual: dict[str, Any] = {"choices": ("bf16", "fp32"), "default": "bf16"}
    text = "type of the computation (default: bf16)"
    add("--precision", type=lambda word: name_of(word, CATALOG), help=text, **usual)
    add_json(parser)


def lint_files(options: argparse.Namespace) -> int:
    """Print each file's wasteful settings; return 1 if any wastes."""
    console = make_console()
    paths = [Path(name) for name in options.files] or own_files()
    devices = options.processes or DEVICES
    model = model_name(options.model)
    spec = Spec(  # one sample per device, since no rule reads the batch
        recipe=f"zero3+{options.precision}",
        model=model,
        objective=usual_objective(model),
        processes=devices,
        global_batch=devices,
        data="synthetic",
    )
    passed = {path: checked(path, options.processes)[1] for path in paths}
    wastes = {path: findings(path, spec) for path in paths}
    console.print(f"{options.model} in {options.precision} on {devices} devices", highlight=False)
    rows = []
    for path, of_file in wastes.items():
        shown = [*(() if path.parent == FOLDER else passed[path]), *of_file]
        lines = [f"[yellow]--[/yellow]  {escape(f'{path.name}: {finding}')}" for finding in shown]
        for line in lines or [f"[green]ok[/green]  {escape(path.name)}"]:
            console.print(line, highlight=False, soft_wrap=True)
        found = [*map(dataclasses.asdict, of_file)]
        rows.append({"file": path, "passed_over": passed[path], "wastes": found})
    write_answer(options, {"model": options.model, "processes": devices, "rows": rows})
    wrong = any(keys for path, keys in passed.items() if path.parent != FOLDER)
    return FAILED if wrong or any(wastes.values()) else OK


def own_files() -> list[Path]:
    return sorted(FOLDER.glob("*.json"))


def findings(path: Path, spec: Spec) -> list[Finding]:
    """Return the wasteful settings of the file at ``path``."""
    zero = checked(path)[0]
    if not zero.get("stage"):
        return []
    resolved = resolve(spec)
    itemsize = 2 if "half_compute" in resolved.launch.traits else 4
    job = Job(sizes=resolved.subject.survey.sizes, itemsize=itemsize, ranks=spec.processes)
    return waste(zero, job)


@functools.lru_cache
def checked(path: Path, processes: int | None = None) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Return a launch file's zero_optimization block, and the keys that its library passes over."""
    try:
        if path.suffix == ".json":
            data = read_json(path)
            known = {"zero_optimization", "distributed_type"}
            if not isinstance(data, dict) or not known & data.keys():
                raise BadFile(f"{path}: no zero_optimization block")
        file, passed = users_launch.read(path, processes)
    except BadFile as error:
        raise SpecError(f"{error}; name a DeepSpeed JSON file") from None
    except BadInput as error:
        raise SpecError(str(error)) from None
    return file.settings.get("zero_optimization", {}), passed
