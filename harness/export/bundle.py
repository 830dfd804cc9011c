"""An export: all of its files, what is left to fill in, and the command that starts it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.export import pages
from harness.export.lines import Lines, lines_of
from harness.export.script import script
from harness.export.settling import YAML, as_json, as_yaml, settle
from harness.export.trainers import Translation, translated
from harness.resolve import Resolved
from strategies.settled import Settled

__all__ = ["PAGE", "SCRIPT", "Bundle", "bundle", "write"]

SCRIPT, PAGE = "train.py", "trainers.md"
STEPS = 2
HEAD_BLANK, PORT = "FILL.IN.THE.FIRST.MACHINE", 29500


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """``files``: name -> text. ``blanks``: "file: key" -> what only the user can put there."""

    folder: Path
    title: str
    files: Mapping[str, str]
    blanks: Mapping[str, str]
    lines: Sequence[Lines]
    translations: Sequence[Translation]
    command: str


def bundle(
    resolved: Resolved, folder: Path, trainers: Sequence[str], plan: str = "", machines: int = 1
) -> Bundle:
    """Everything, as text; nothing is written.

    Args:
        folder: where the files will lie, absolute: the launch file names others by it.
        plan: the command that plans it, which train.py names.
        machines: among which the GPUs are shared alike.
        trainers: those whose options are told (``harness.export.trainers.known``).

    Raises:
        BadInput: the recipe's numbers cannot be settled, or an unknown trainer.
    """
    made = [translated(name, resolved, str(folder / YAML)) for name in trainers]
    settled, lines = settle(resolved, folder), lines_of(resolved)
    title, line, file = _title(resolved), _command(resolved, folder), resolved.launch.engine.file
    content, blanks = _among(machines, settled)
    files = {YAML: as_yaml(content, file.title, file.source)}
    files |= {name: as_json(content) for name, content in settled.files.items()}
    files[SCRIPT] = script(title, (line, plan), lines, _numbers(resolved), settled.handlers)
    carried = dict.fromkeys(path for part in lines for path in part.carry)
    files |= {path.name: path.read_text(encoding="utf-8") for path in carried}
    if made:
        files[PAGE] = pages.page(title, made)
    return Bundle(
        folder=folder,
        title=title,
        files=files,
        blanks=blanks,
        lines=lines,
        translations=made,
        command=line,
    )


def _among(machines: int, settled: Settled) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """accelerate's file and its blanks for several machines: each gets the file with its rank."""
    if machines == 1:
        return settled.content, settled.blanks
    own = {"num_machines": machines, "machine_rank": 0, "main_process_ip": HEAD_BLANK}
    blanks = {
        f"{YAML}: machine_rank": "0 on the first machine, 1 on the next, and so on",
        f"{YAML}: main_process_ip": "the address of the first machine, on every machine",
    }
    return {**settled.content, **own, "main_process_port": PORT}, {**settled.blanks, **blanks}


def write(made: Bundle) -> None:
    """Write the files; the folder is made."""
    made.folder.mkdir(parents=True, exist_ok=True)
    for name, text in made.files.items():
        (made.folder / name).write_text(text, encoding="utf-8")


def _title(resolved: Resolved) -> str:
    spec, many = resolved.spec, resolved.launch.processes
    where = "GPU" if spec.device == "cuda" else "process"
    plural = "" if many == 1 else "s" if where == "GPU" else "es"
    on = f"{many} {where}{plural}"
    return f"{resolved.recipe} for {spec.model} on {on}, global batch {spec.global_batch}"


def _numbers(resolved: Resolved) -> str:
    values = f"{resolved.micro_batch}, {resolved.launch.accumulation}, {STEPS}"
    return f"MICRO_BATCH, ACCUMULATION, STEPS = {values}"


def _command(resolved: Resolved, folder: Path) -> str:
    """The line that starts train.py from the folder in which the user is."""
    here = Path(os.path.relpath(folder)) if folder.is_relative_to(Path.cwd()) else folder
    added = resolved.launch.engine.environment(resolved.spec.device)
    lead = [f"{key}={value}" for key, value in added.items()]
    words = ["accelerate", "launch", "--config_file", str(here / YAML), str(here / SCRIPT)]
    return shlex.join([*(["env", *lead] if lead else []), *words])
