"""An export: its files, the values that the user must fill in, and the command that starts it."""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.planner.adapters.base import ResolvedConfig
from harness.planner.export import trainers as pages
from harness.planner.export.lines import YAML, Lines, as_json, as_yaml, lines_of, settle
from harness.planner.export.trainers import Translation, translated
from harness.resolve import Resolved

# ---- train.py ----
# The example trainer with a recipe's lines at their places, marked for copying.


STAND_IN = Path(__file__).with_name("stand_in.py")
BEGIN, END = "# >>>", "# <<<"
PLACE = re.compile(r"^( *)(.*?)(?:  )?# \[(\w+)\]$")
HEAD = '''"""{title}

The lines between >>> and <<< are the recipe: carry them to your own trainer, in this order. All
else stands in for it, so that this file runs by itself:

    {command}
{plan}"""
'''
PLAN = """
The plan that says what it needs:

    {}
"""


def script(
    title: str,
    commands: tuple[str, str],
    lines: Sequence[Lines],
    numbers: str,
    handlers: Sequence[str],
) -> str:
    """Return the text of train.py.

    Args:
        commands: the command that starts it, and the one that plans it (empty: none).
        numbers: the line that sets micro-batch, accumulation, steps and the number of blocks.
        handlers: code of ``kwargs_handlers`` that the engine needs, beside those of the
            strategies.
    """
    _, _, body = STAND_IN.read_text(encoding="utf-8").split('"""', 2)
    made: list[str] = []
    for line in body.lstrip("\n").splitlines():
        found = PLACE.match(line)
        if found is None:
            made.append(line)
            continue
        indent, usual, place = found.groups()
        text = "\n".join(_at(place, usual, lines, numbers, handlers))
        made += textwrap.indent(text, indent).splitlines()
    start, plan = commands
    head = HEAD.format(title=title, command=start, plan=PLAN.format(plan) if plan else "")
    text = head + "\n" + "\n".join(made) + "\n"
    return re.sub(r"\n{4,}", "\n\n\n", text)


def _at(
    place: str, usual: str, lines: Sequence[Lines], numbers: str, handlers: Sequence[str]
) -> list[str]:
    """Return the lines at a place; ``usual`` is the example trainer's own line there."""
    if place == "numbers":
        return [numbers]
    if place == "imports":
        return _imports(lines, handlers)
    if place == "accelerator":
        return _accelerator(lines, handlers) or [usual]
    blocks = [_marked(part, part.places[place]) for part in lines if place in part.places]
    if place == "functions":
        blocks = [["", *block, ""] for block in blocks]
    return [line for block in blocks for line in block] or ([usual] if usual else [])


def _marked(part: Lines, text: str) -> list[str]:
    return [f"{BEGIN} {part.of}", *text.rstrip("\n").splitlines(), END]


def _imports(lines: Sequence[Lines], handlers: Sequence[str]) -> list[str]:
    wanted = [line for part in lines for line in part.places.get("imports", "").splitlines()]
    names = " ".join(part.of for part in lines if "imports" in part.places)
    made = [f"{BEGIN} {names}", *dict.fromkeys(wanted), END] if wanted else []
    own = sorted({handler.partition("(")[0] for handler in handlers})
    return [*([f"from accelerate import {', '.join(own)}"] if own else []), *made]


def _accelerator(lines: Sequence[Lines], handlers: Sequence[str]) -> list[str]:
    """Return the call of ``Accelerator`` with the strategies' arguments, if there are any."""
    given = [part.places["accelerator"].strip() for part in lines if "accelerator" in part.places]
    handed = [part.places["handlers"].strip() for part in lines if "handlers" in part.places]
    if handlers or handed:
        given.append(f"kwargs_handlers=[{', '.join([*handlers, *handed])}]")
    if not given:
        return []
    names = [part.of for part in lines if {"accelerator", "handlers"} & set(part.places)]
    call = ["accelerator = Accelerator(", *(f"    {text}," for text in given), ")"]
    return [f"{BEGIN} {' '.join(names)}", *call, END] if names else call


SCRIPT, PAGE = "train.py", "trainers.md"
STEPS = 2
HEAD_BLANK, PORT = "FILL.IN.THE.FIRST.MACHINE", 29500


@dataclass(frozen=True)
class Bundle:
    """The files and texts of an export.

    ``files``: name -> text. ``blanks``: "file: key" -> the value that only the user can fill
    in.
    """

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
    """Return the whole export as text, without writing files.

    Args:
        folder: absolute path of the export, because the launch file names other files by it.
        plan: the command that plans the recipe, which train.py names.
        machines: number of machines that share the GPUs equally.
        trainers: those to translate options for (``harness.planner.export.trainers.known``).

    Raises:
        BadInput: the recipe's numbers cannot be resolved, or a trainer is unknown.
    """
    made = [translated(name, resolved, str(folder / YAML)) for name in trainers]
    found, lines = settle(resolved, folder), lines_of(resolved)
    title, line, file = _title(resolved), _command(resolved, folder), resolved.launch.engine.file
    content, blanks = _among(machines, found)
    files = {YAML: as_yaml(content, file.title, file.source)}
    files |= {name: as_json(content) for name, content in found.files.items()}
    values = resolved.micro_batch, resolved.launch.accumulation, STEPS, resolved.subject.depth
    numbers = f"MICRO_BATCH, ACCUMULATION, STEPS, BLOCKS = {', '.join(map(str, values))}"
    files[SCRIPT] = script(title, (line, plan), lines, numbers, found.handlers)
    carried = dict.fromkeys(path for part in lines for path in part.carry)
    files |= {path.name: path.read_text(encoding="utf-8") for path in carried}
    if made:
        files[PAGE] = pages.page(title, made)
    return Bundle(folder, title, files, blanks, lines, made, line)


def _among(machines: int, found: ResolvedConfig) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Return accelerate's file for several machines, and the values to fill in on each."""
    if machines == 1:
        return found.content, found.blanks
    own = {"num_machines": machines, "machine_rank": 0, "main_process_ip": HEAD_BLANK}
    blanks = {
        f"{YAML}: machine_rank": "0 on the first machine, 1 on the next, and so on",
        f"{YAML}: main_process_ip": "the address of the first machine, on every machine",
    }
    return {**found.content, **own, "main_process_port": PORT}, {**found.blanks, **blanks}


def _title(resolved: Resolved) -> str:
    spec, many = resolved.spec, resolved.launch.processes
    where = "GPU" if spec.device == "cuda" else "process"
    plural = "" if many == 1 else "s" if where == "GPU" else "es"
    on = f"{many} {where}{plural}"
    return f"{resolved.recipe} for {spec.model} on {on}, global batch {spec.global_batch}"


def _command(resolved: Resolved, folder: Path) -> str:
    here = Path(os.path.relpath(folder)) if folder.is_relative_to(Path.cwd()) else folder
    added = resolved.launch.engine.environment(resolved.spec.device)
    lead = [f"{key}={value}" for key, value in added.items()]
    words = ["accelerate", "launch", "--config_file", str(here / YAML), str(here / SCRIPT)]
    return shlex.join([*(["env", *lead] if lead else []), *words])
