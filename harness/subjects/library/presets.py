"""Which model a name means: presets, and any class of the library with a configuration. No torch.

The facts are in ``presets.yaml``; what a class is given, in ``families``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from harness.json_files import BadFile, read_json
from harness.subjects.library.families import FAMILIES, REFUSED, Family
from strategies.base import BadInput
from strategies.files import parse_yaml

__all__ = ["PREFIX", "Known", "canonical", "find", "is_named", "table", "values"]

PREFIX = "diffusers:"
FILE = Path(__file__).with_name("presets.yaml")
NOT_CONFIG = ("_class_name", "_diffusers_version", "_name_or_path")


@dataclass(frozen=True)
class Known:
    """One model: its class, what differs from the class's defaults, and its usual sizes.

    ``config``: key -> value. ``parameters``: elements "built" and "published", and who "told";
    empty where it is no preset. ``usual``: facts of the family that are otherwise here. ``hub``:
    its names on the Hugging Face Hub.
    """

    family: Family
    config: Mapping[str, Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)
    hub: Sequence[str] = ()


@functools.cache
def table() -> dict[str, Known]:
    """Name -> preset."""
    rows = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {
        name: Known(
            family=FAMILIES[row["class"]],
            config=row["config"],
            parameters=row["parameters"],
            hub=row["hub"],
            usual={k: row[k] for k in ("down", "resolution", "frames", "text") if k in row},
        )
        for name, row in rows.items()
    }


@functools.cache
def _spellings() -> dict[str, str]:
    """Letters and digits of a preset's name, or of one of its names on the Hub -> preset."""
    hub = {_letters(name): key for key, known in table().items() for name in known.hub}
    tails = {_letters(name.partition("/")[2]): key
             for key, known in table().items() for name in known.hub}  # fmt: skip
    return hub | tails | {_letters(key): key for key in table()}


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def canonical(model: str) -> str:
    """The preset that ``model`` spells, by its own name or by one on the Hub; else as it is."""
    dit = re.fullmatch(r"(?i:dit)-([a-zA-Z]+)(/\d)?", model)
    if dit:
        return f"DiT-{dit[1].upper()}{dit[2] or ''}"
    named = model in table() or model.startswith("DiT") or set(model) & set(":=")
    return model if named else _spellings().get(_letters(model), model)


def is_named(model: str) -> bool:
    """Whether ``model`` is a name of this library's."""
    return model in table() or model.startswith(PREFIX)


def find(model: str, config: str = "", changes: str = "") -> Known:
    """The model of that name, with its configuration read and changed.

    Args:
        config: a config.json as the library writes it; for ``diffusers:CLASS`` alone.
        changes: KEY=VALUE,KEY=VALUE over it.

    Raises:
        BadInput: an unknown class, one that cannot be planned, an unreadable file.
    """
    if model in table():
        if config:
            raise BadInput(
                f"config is {config}, and model {model} has its own; leave --config out, or give "
                f"--model {PREFIX}CLASS"
            )
        known = table()[model]
    else:
        read = _read(config) if config else {}
        known = Known(family=_family(model, read.get("_class_name", "")), config=_plain(read))
    return dataclasses.replace(known, config={**known.config, **values(changes)})


def _family(model: str, written: str) -> Family:
    name = model.removeprefix(PREFIX)
    if name in REFUSED:
        raise BadInput(f"model {model} cannot be trained here: {REFUSED[name]}")
    if name not in FAMILIES:
        raise BadInput(
            f"model {model}: what {name or 'it'} is given is not known; one of "
            f"{', '.join(sorted(FAMILIES))}, or give it as a module of your own with a batch: "
            "--model mine.py:make (docs/models.md)"
        )
    if written and written != name:
        raise BadInput(f"config is of a {written}; give --model {PREFIX}{written}")
    return FAMILIES[name]


def _read(path: str) -> dict[str, Any]:
    try:
        found = read_json(path)
    except BadFile as error:
        raise BadInput(f"config is {error}; give a model's config.json") from None
    if not isinstance(found, dict):
        raise BadInput(f"config is {path}, which holds no object; give a model's config.json")
    return found


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in NOT_CONFIG}


def values(text: str) -> dict[str, Any]:
    """``num_layers=2,axes_dims_rope=[4,4,8]`` as a mapping; values are YAML's.

    Raises:
        BadInput: a part that is no KEY=VALUE.
    """
    found = {}
    for part in filter(None, re.split(r",(?![^\[]*\])", text)):
        key, equals, value = part.partition("=")
        if not equals or not key.strip().isidentifier():
            raise BadInput(f"set is {text!r:.80}; write KEY=VALUE,KEY=VALUE, as in num_layers=2")
        try:
            found[key.strip()] = parse_yaml(value)
        except ValueError as error:
            name = f"set is {text!r:.80}: {key.strip()} is {value!r:.40}"
            raise BadInput(f"{name}: {error}") from None
    return found
