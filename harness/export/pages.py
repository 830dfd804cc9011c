"""trainers.md: a recipe in the words of other trainers, a section each."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from harness.export.trainers import Missing, Translation

__all__ = ["page", "written"]


def page(title: str, translations: Sequence[Translation]) -> str:
    """All sections, under what they are of."""
    head = (
        f"# {title}\n\nWhat means the same in other trainers. Each option was looked up in the "
        "source named with it; another version may differ. What has no counterpart is named.\n"
    )
    return "\n".join([head, *(section(each) for each in translations)])


def section(made: Translation) -> str:
    """One trainer's."""
    about = made.trainer
    read = "".join(f"- `{path}`\n" for path in about["read"])
    parts = [f"## {about['title']}\n", _unplanned(made), written(made)]
    parts.append(_listed("Beside these", made.beside))
    parts.append(_told("Where it differs", made.notes))
    parts.append(_told("No counterpart", made.lacks))
    parts.append(_evidence(made))
    where = f"Read: {about['repository']} at {about['commit']} ({about['version']}):\n\n{read}"
    return "\n".join([*(part for part in parts if part), where])


def _unplanned(made: Translation) -> str:
    """What keeps the trainer from training as planned, above its options."""
    if not made.unplanned:
        return ""
    names = ", ".join(f"`{name}`" for name in made.unplanned)
    return f"**The plan's memory does not hold here**: no counterpart for {names}.\n"


def _evidence(made: Translation) -> str:
    """Each option with its meaning in the source, as far as the table has it."""
    known = made.trainer.get("evidence", {})
    rows = [f"| `{name}` | {known[name]} |" for name in made.options if name in known]
    head = ["| Option | Where it is read, and what it does |", "|---|---|"]
    return "\n".join([*head, *rows]) + "\n" if rows else ""


def written(made: Translation) -> str:
    """The options as the trainer takes them, in a block of code."""
    if made.trainer["form"] == "flags":
        flags = "".join(f" \\\n    {line}" for line in _flags(made.options))
        return f"```sh\n{made.start}{flags}\n```\n"
    start, file = made.start, made.trainer["file"]
    if made.trainer["form"] == "json":
        text, kind = json.dumps(made.options, indent=2), "json"
    elif made.trainer["form"] == "toml":
        text, kind = _toml(made.options), "toml"
    else:
        text, kind = yaml.safe_dump(_nested(made.options), sort_keys=False).rstrip(), "yaml"
    return f"```sh\n{start}\n```\n\n{file}:\n\n```{kind}\n{text}\n```\n"


def _flags(options: Mapping[str, Any]) -> list[str]:
    """``--name value``; a flag alone where it is on, several values for a list."""
    lines = []
    for name, value in options.items():
        given = [] if value is True else value if isinstance(value, list) else [value]
        lines.append(shlex.join([name, *map(str, given)]))
    return lines


def _toml(options: Mapping[str, Any]) -> str:
    """Keys of the file, then its tables; strings, numbers and lists are written as in JSON."""
    made = {name: value for name, value in options.items() if "." not in name}
    lines = [f"{name} = {json.dumps(value)}" for name, value in made.items()]
    for table, keys in _nested({k: v for k, v in options.items() if "." in k}).items():
        lines += ["", f"[{table}]", *(f"{name} = {json.dumps(v)}" for name, v in keys.items())]
    return "\n".join(lines)


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """``train.lr`` as a key within a key."""
    made: dict[str, Any] = {}
    for name, value in options.items():
        *above, last = name.split(".")
        block = made
        for key in above:
            block = block.setdefault(key, {})
        block[last] = value
    return made


def _told(title: str, things: Sequence[Missing]) -> str:
    return _listed(title, [f"`{what}`: {why}" for what, why in things])


def _listed(title: str, lines: Sequence[str]) -> str:
    return f"{title}:\n\n" + "".join(f"- {line}\n" for line in lines) if lines else ""
