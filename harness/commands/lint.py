"""``./run.sh lint``: report DeepSpeed settings that waste memory for a model. Needs no torch."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
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
from strategies import CATALOG
from strategies.engines.zero.waste import DEFAULTS, Finding, Job, prices, waste
from strategies.launch_file import FOLDER
from strategies.subject import Shaping
from strategies.words import name_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lint``."""
    add = parser.add_argument
    add(
        "files",
        nargs="*",
        metavar="FILE.json",
        help="DeepSpeed JSON files (default: those in launch_configs)",
    )
    text = "a preset or FILE.py:CLASS (default: DiT-XL/2)"
    add("--model", type=families.canonical, metavar="MODEL", default="DiT-XL/2", help=text)
    add("--processes", type=int, metavar="N", default=8, help="devices (default: 8)")
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
    """Print each file's wasteful settings and its trades of memory; return 1 if any wastes."""
    console = make_console()
    paths = [Path(name) for name in options.files] or own_files()
    spec = lint_spec(options.model, options.processes, options.precision)
    wastes = {path: findings(path, spec) for path in paths}
    paid = {path: costs(path, spec) for path in paths}
    console.print(
        f"{options.model} in {options.precision} on {options.processes} devices", highlight=False
    )
    for path, of_file in wastes.items():
        _tell(path, of_file, paid[path], console)
    told = ((path, [*map(dataclasses.asdict, w)], [*map(dataclasses.asdict, paid[path])])
            for path, w in wastes.items())  # fmt: skip
    rows = [dict(zip(("file", "wastes", "trades"), one, strict=True)) for one in told]
    write_answer(options, {"model": options.model, "processes": options.processes, "rows": rows})
    return FAILED if any(wastes.values()) else OK


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


def own_findings(spec: Spec) -> dict[str, list[Finding]]:
    """Return the findings of this project's own files for the model of ``spec``, by file name."""
    return {path.name: findings(path, spec) for path in own_files()}


def findings(path: Path, spec: Spec) -> list[Finding]:
    """Return the wasteful settings of the file at ``path``.

    Raises:
        SpecError: the file is no readable DeepSpeed JSON; names the file and a remedy.
    """
    return waste(_zero_block(path), _job(spec))


def costs(path: Path, spec: Spec) -> list[Finding]:
    """Return the memory that the file at ``path`` trades for speed; raises as ``findings``."""
    return prices(_zero_block(path), _job(spec))


def _job(spec: Spec) -> Job:
    resolved = resolve(spec)
    itemsize = 2 if "half_compute" in resolved.launch.traits else 4
    return Job(sizes=resolved.subject.sizes, itemsize=itemsize, ranks=spec.processes)


def _zero_block(path: Path) -> Mapping[str, Any]:
    try:
        config = read_json(path)
    except BadFile as error:
        raise SpecError(f"{error}; name a DeepSpeed JSON file") from None
    block = config.get("zero_optimization") if isinstance(config, dict) else None
    if not isinstance(block, dict):
        raise SpecError(f"{path}: no zero_optimization block; name a DeepSpeed JSON")
    _check(path, block)
    return block


def _check(path: Path, block: Mapping[str, Any]) -> None:
    """Refuse values that the rules cannot compute with."""
    stage = block.get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise SpecError(f"{path}: stage is {stage!r:.60}; give 0, 1, 2 or 3")
    for key, value in block.items():
        if key.startswith("offload_") and not isinstance(value, (dict, type(None))):
            raise SpecError(f'{path}: {key} is {value!r:.60}; write it as {{"device": "cpu"}}')
        if key in DEFAULTS and not _is_size(value):
            raise SpecError(f'{path}: {key} is {value!r:.60}; give a number of elements or "auto"')
        if key == "overlap_comm" and value not in (True, False, None, "auto"):
            raise SpecError(f"{path}: {key} is {value!r:.60}; give true or false")


def _is_size(value: Any) -> bool:
    if value == "auto":
        return True
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value < float("inf")


def _tell(path: Path, wasted: list[Finding], paid: list[Finding], console: Console) -> None:
    lines = [] if wasted else [f"[green]ok[/green]  {escape(path.name)}"]
    lines += [f"[yellow]--[/yellow]  {escape(f'{path.name}: {finding}')}" for finding in wasted]
    lines += [f"[cyan]..[/cyan]  {escape(f'{path.name}: {finding}')}" for finding in paid]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
