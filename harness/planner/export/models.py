"""Model of a trainer's configuration, from its script, its keys or its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from harness.planner.export.matching import same
from harness.subjects.library import families
from strategies.base import BadInput
from strategies.recipe import nearest

PATHS = ("--pretrained_model_name_or_path", "pretrained_model_name_or_path", "model.name_or_path",
         "--dit", "model.diffusers_path", "model.transformer_path", "model.ckpt_path")  # fmt: skip
"""Options that name the model's weights."""
PLACES = ("path", "models/", "<", "./")
"""Beginnings of names of files, which no name of the Hub has."""
ALIKE = 0.01
"""Relative difference of two models' sizes below which either may be planned for the other."""


def model_of(
    table: Mapping[str, Any], options: Mapping[str, Any], script: str
) -> tuple[str, list[str]]:
    """Return the preset of a configuration's model, and what was assumed for it.

    Raises:
        BadInput: no model that is known, several of different sizes, or two that contradict.
    """
    every = _named(table, options, script)
    path = next((str(options[key]) for key in PATHS if options.get(key)), "")
    stem = PurePosixPath(path.replace("\\", "/")).name
    found = {families.canonical(text) for text in (path, stem, stem.rpartition(".")[0])}
    found &= set(families.table())
    if found & set(every) or (found and not every):
        return next(iter(found & set(every) or found)), []
    if found:
        raise BadInput(
            f"the weights are {found.pop()}'s, and {script or 'the model'} is one of "
            f"{', '.join(every)}; correct one, or give --model NAME"
        )
    flavour = str(options.get("model_flavour", "")).lower()
    flavours = {name: table["models"][name].get("flavours", [flavour]) for name in every}
    able = [name for name in every if flavour in flavours[name]]
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith(PLACES)
    if hub and not re.search(r"\.[a-z]{2,11}$", stem):
        near = nearest(stem.lower(), families.table())
        raise BadInput(f"model {path} is not known; {near} Give --model NAME")
    if not able:
        said = [
            f"{key} {options[key]}"
            for key in (*table.get("model", ()), "model_flavour")
            if key in options
        ]
        known = ", ".join(table["models"])
        raise BadInput(f"no model is known for {', '.join(said) or 'it'}; give --model, of {known}")
    sizes = [families.table()[name].parameters["built"] for name in able]
    if max(sizes) > (1 + ALIKE) * min(sizes):
        raise BadInput(f"which of {', '.join(able)}? Give --model NAME")
    weights = f", for weights {path}" if path else ""
    return able[0], [f"model {able[0]}{weights}"] if path or len(able) > 1 else []


def _named(table: Mapping[str, Any], options: Mapping[str, Any], script: str) -> list[str]:
    """Return the presets that the table has for the script or the model's key."""
    found: dict[str, int] = {}
    for name, words in table["models"].items():
        some = [words[kind] for kind in ("any", "lora", "full") if kind in words]
        found[name] = max(_agrees(word, table, options, script) for word in some)
    best = max(found.values(), default=0)
    return [name for name, score in found.items() if score == best > 0]


def _agrees(word: str, table: Mapping[str, Any], options: Mapping[str, Any], script: str) -> int:
    """Return how many words of a table's model agree with the options; 0 if one does not."""
    for key in table.get("model", ()):
        return int(same(word, options.get(key)))
    own, *rest = ["", *word.split()] if word.startswith("-") else word.split()
    if script and own and PurePosixPath(own).name != script:
        return 0
    pairs = zip(rest[::2], rest[1::2], strict=True)
    asked = [pair for pair in pairs if not (script and pair[0] == "--network_module")]
    right = [same(value, options.get(name)) for name, value in asked]
    return (len(right) + bool(script and own)) * all(right)
