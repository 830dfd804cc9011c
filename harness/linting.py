"""``./run.sh lint``: DeepSpeed settings that waste memory for a model, file by file. No torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.lint import Finding, job_of, lint
from harness.progress import make_console
from harness.resolve import resolve
from harness.spec import Spec, SpecError
from strategies.sharding import FOLDER

__all__ = ["add_arguments", "lint_files", "own_findings"]

OK, FAILED = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``lint``."""
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE.json", help="DeepSpeed files (default: our own)")
    add("--model", metavar="MODEL", default="DiT-XL/2", help="model preset (default: DiT-XL/2)")
    add("--processes", type=int, metavar="N", default=8, help="devices (default: 8)")
    add("--precision", choices=("bf16", "fp32"), default="bf16", help="(default: bf16)")


def lint_files(options: argparse.Namespace) -> int:
    """Print what each file wastes; 1 if any does."""
    console = make_console()
    paths = [Path(name) for name in options.files] or own_files()
    spec = Spec(
        recipe=f"zero3+{options.precision}",
        model=options.model,
        processes=options.processes,
        global_batch=options.processes,
        data="synthetic",
    )
    found = {path: findings(path, spec) for path in paths}
    console.print(
        f"{options.model} in {options.precision} on {options.processes} devices", highlight=False
    )
    for path, wasted in found.items():
        _tell(path, wasted, console)
    return FAILED if any(found.values()) else OK


def own_files() -> list[Path]:
    """The DeepSpeed JSONs of this project."""
    return sorted(FOLDER.glob("*.json"))


def own_findings(spec: Spec) -> dict[str, list[Finding]]:
    """What this project's own files waste for the model of ``spec``: file name -> findings."""
    return {path.name: findings(path, spec) for path in own_files()}


def findings(path: Path, spec: Spec) -> list[Finding]:
    """What the file at ``path`` wastes.

    Raises:
        SpecError: no readable DeepSpeed JSON; names the file and the way out.
    """
    return lint(_zero_block(path), job_of(resolve(spec)))


def _zero_block(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: not readable as JSON ({error}); name a DeepSpeed file") from None
    block = config.get("zero_optimization") if isinstance(config, dict) else None
    if not isinstance(block, dict):
        raise SpecError(f"{path}: no zero_optimization block; name a DeepSpeed JSON")
    for key, value in block.items():
        if key.endswith(("_size", "_parameters", "_distance", "_threshold")) and not (
            value == "auto" or (isinstance(value, (int, float)) and value >= 0)
        ):
            raise SpecError(f'{path}: {key} is {value!r}; give a number of elements or "auto"')
    return block


def _tell(path: Path, wasted: list[Finding], console: Console) -> None:
    if not wasted:
        console.print(f"[green]ok[/green]  {path.name}", highlight=False)
    for finding in wasted:
        console.print(f"[yellow]--[/yellow]  {path.name}: {finding}", highlight=False)
