"""Rules about strategies, kept as data: which lines of code, or which options, a part means.

A table maps a strategy's name to rules, the first of which that fits is taken. The conditions of a
rule: ``for`` (values of parameters, or lists of them), ``with`` and ``without`` (traits of the
launch), ``device``. All else is what it means; ``$name`` there is a parameter, or a number of the
training.

A parameter that a rule neither names nor uses must have its default, or the rule does not fit: what
a rule was not written for is never claimed by it. ``any`` names those that make no difference.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import yaml

from strategies.engine import Launch

__all__ = ["Rule", "filled", "fitting", "read", "read_folder"]

Rule = Mapping[str, Any]
CONDITIONS = ("for", "with", "without", "device", "any")


@functools.cache
def read(path: Path) -> dict[str, Any]:
    """A table of rules."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@functools.cache
def read_folder(folder: Path) -> dict[str, Any]:
    """All tables of a folder as one."""
    return {name: rules for p in sorted(folder.glob("*.yaml")) for name, rules in read(p).items()}


def fitting(
    rules: Sequence[Rule],
    values: Mapping[str, Any],
    launch: Launch,
    usual: Mapping[str, Any] | None = None,
) -> Rule | None:
    """The first rule that fits, without its conditions; None where there is none.

    ``values`` are those that ``for`` asks for, by name; ``usual`` are the defaults of those that a
    rule must be written for where they differ from it.
    """
    for rule in rules:
        asked = all(_answers(rule, name, values, usual or {}) for name in values)
        if asked and _stands_beside(rule, launch):
            return {key: value for key, value in rule.items() if key not in CONDITIONS}
    return None


def _stands_beside(rule: Rule, launch: Launch) -> bool:
    wanted, unwanted = set(rule.get("with", ())), set(rule.get("without", ()))
    device = rule.get("device", launch.device)
    return wanted <= launch.traits and not unwanted & launch.traits and device == launch.device


def _answers(rule: Rule, name: str, values: Mapping[str, Any], usual: Mapping[str, Any]) -> bool:
    """Whether a rule was written for the value of one parameter."""
    value, wanted = values[name], rule.get("for", {})
    if name in wanted:
        some = wanted[name]
        return value in some if isinstance(some, list) else value == some
    if name in rule.get("any", ()) or value == usual.get(name, value):
        return True
    meant = (text for key, item in rule.items() if key not in CONDITIONS for text in _texts(item))
    return any(re.search(rf"\${name}\b", text) for text in meant)


def _texts(value: Any) -> Iterator[str]:
    """All strings within a value, keys of mappings too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for item in pair for text in _texts(item))
    elif isinstance(value, list):
        yield from (text for item in value for text in _texts(item))


def filled(value: Any, numbers: Mapping[str, Any]) -> Any:
    """``value`` with each ``$name`` replaced. A text that is one name alone becomes the number
    itself, so that it has its type in JSON and YAML.

    Raises:
        KeyError: a name that nobody knows.
    """
    if isinstance(value, str):
        alone = re.fullmatch(r"\$(\w+)", value)
        return numbers[alone[1]] if alone else Template(value).substitute(numbers)
    if isinstance(value, Mapping):
        return {filled(key, numbers): filled(item, numbers) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, numbers) for item in value]
    return value
