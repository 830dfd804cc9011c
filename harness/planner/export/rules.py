"""Rules of the trainers' tables: the first that fits a recipe's part counts."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from strategies.engine import RunContext
from strategies.files import own_table

# Tables map a strategy's name to rules, of which the first that fits applies. The conditions of a
# rule are ``for`` (values of parameters, or lists of them), ``with`` and ``without`` (traits of the
# launch), ``device`` and ``models``. In all other entries ``$name`` is a parameter or a number of
# the training. ``reads`` has the strategy or the parameters that a reading of the options takes.
#
# A parameter that a rule neither names nor uses must have its default, so a rule never applies to a
# case that it was not written for. ``any`` names parameters that make no difference.


Rule = Mapping[str, Any]
CONDITIONS = ("for", "with", "without", "device", "models", "any", "reads")


@functools.cache
def read(path: Path) -> dict[str, Any]:
    """Read a table of rules."""
    return own_table(path)


def fitting(
    rules: Sequence[Rule],
    values: Mapping[str, Any],
    launch: RunContext,
    usual: Mapping[str, Any] | None = None,
) -> Rule | None:
    """Return the first rule that fits, without its conditions; None if none fits.
    ``values`` are the values that ``for`` compares, by name. ``usual`` are defaults: a rule must
    cover a value that differs from them."""
    for rule in rules:
        fits = (
            all(_answers(rule, name, values, usual or {}) for name in values)
            and rule.get("device", launch.device) == launch.device
            and ("models" not in rule or launch.subject.model in rule["models"])
            and launch.traits.issuperset(rule.get("with", ()))
            and launch.traits.isdisjoint(rule.get("without", ()))
        )
        if fits:
            return {key: value for key, value in rule.items() if key not in CONDITIONS}
    return None


def _answers(rule: Rule, name: str, values: Mapping[str, Any], usual: Mapping[str, Any]) -> bool:
    """Return True if a rule covers the value of one parameter."""
    value, wanted = values[name], rule.get("for", {})
    if name in wanted:
        some = wanted[name]
        return value in some if isinstance(some, list) else value == some
    if name in rule.get("any", ()) or value == usual.get(name, value):
        return True
    meant = {key: item for key, item in rule.items() if key not in CONDITIONS}
    return re.search(rf"\${name}\b", json.dumps(meant)) is not None


def filled(value: Any, numbers: Mapping[str, Any]) -> Any:
    """Return ``value`` with each ``$name`` replaced.

    A text of one name alone becomes the number itself, which keeps its type in JSON and YAML.

    Raises:
        KeyError: an unknown name.
    """
    if isinstance(value, str):
        alone = re.fullmatch(r"\$(\w+)", value)
        return numbers[alone[1]] if alone else Template(value).substitute(numbers)
    if isinstance(value, Mapping):
        return {filled(key, numbers): filled(item, numbers) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, numbers) for item in value]
    return value
