"""train.py: the stand-in with a recipe's lines in their places, marked to be carried home."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.export.lines import Lines

__all__ = ["BEGIN", "END", "script"]

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
    """The text of train.py.

    Args:
        commands: the one that starts it, and the one that plans it (empty: none is named).
        numbers: the line that sets micro batch, accumulation and steps.
        handlers: code of ``kwargs_handlers`` that the engine needs, beside those of the parts.
    """
    _, _, body = STAND_IN.read_text(encoding="utf-8").split('"""', 2)
    made: list[str] = []
    for line in body.lstrip("\n").splitlines():
        found = PLACE.match(line)
        if found is None:
            made.append(line)
            continue
        indent, usual, place = found.groups()
        made += _indented(_at(place, usual, lines, numbers, handlers), indent)
    start, plan = commands
    head = HEAD.format(title=title, command=start, plan=PLAN.format(plan) if plan else "")
    text = head + "\n" + "\n".join(made) + "\n"
    return re.sub(r"\n{4,}", "\n\n\n", text)


def _at(
    place: str, usual: str, lines: Sequence[Lines], numbers: str, handlers: Sequence[str]
) -> list[str]:
    """What stands at a place; ``usual`` is the stand-in's own line there."""
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
    """Each import once, under the names of the parts that want it."""
    wanted = [line for part in lines for line in part.places.get("imports", "").splitlines()]
    names = " ".join(part.of for part in lines if "imports" in part.places)
    made = [f"{BEGIN} {names}", *dict.fromkeys(wanted), END] if wanted else []
    own = sorted({handler.partition("(")[0] for handler in handlers})
    return [*([f"from accelerate import {', '.join(own)}"] if own else []), *made]


def _accelerator(lines: Sequence[Lines], handlers: Sequence[str]) -> list[str]:
    """The call of ``Accelerator`` with what the parts ask of it; nothing where they ask nothing."""
    given = [part.places["accelerator"].strip() for part in lines if "accelerator" in part.places]
    handed = [part.places["handlers"].strip() for part in lines if "handlers" in part.places]
    if handlers or handed:
        given.append(f"kwargs_handlers=[{', '.join([*handlers, *handed])}]")
    if not given:
        return []
    names = [part.of for part in lines if {"accelerator", "handlers"} & set(part.places)]
    call = ["accelerator = Accelerator(", *(f"    {text}," for text in given), ")"]
    return [f"{BEGIN} {' '.join(names)}", *call, END] if names else call


def _indented(lines: Iterable[str], indent: str) -> list[str]:
    return textwrap.indent("\n".join(lines), indent).splitlines()
