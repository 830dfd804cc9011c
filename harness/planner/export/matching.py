"""Reading of a configuration, and comparison of a rule's options with its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from harness.planner.export.files import flat
from harness.planner.resident_models import USUAL
from harness.planner.verdict import Uncounted

NO_MEMORY = {"learning_rate", "beta1", "beta2", "eps", "weight_decay", "clip", "ema_decay"}
"""Numbers of a training that do not change its memory; a reading does not compare them."""


@dataclass(kw_only=True)
class Reading:
    """A trainer's configuration as a recipe.
    ``means``: (setting, meaning) of the file. ``usual``: (default of the trainer, meaning, source).
    ``differs``: differences that the table notes. ``unread``: options without a row. ``also``:
    models that stay on the GPU beside the trained one; ``encoding``: parts of them that encode in
    each step (``resident_models.PARTS``). ``idle``: options of adapters that do nothing, because
    all weights train by a default; ``intended``: the reading with adapters."""

    trainer: str = ""
    model: str = ""
    recipe: str = ""
    processes: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    average: float = 0.0
    resolution: str = ""
    frames: int = 0
    text: int = 0
    means: list[tuple[str, str]] = field(default_factory=list)
    usual: list[tuple[str, str, str]] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    unpredicted: list[Uncounted] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    also: list[str] = field(default_factory=list)
    encoding: list[str] = field(default_factory=list)
    intended: Reading | None = None

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step."""
        return self.micro_batch * self.accumulation * self.processes

    @property
    def phases(self) -> list[str]:
        """Phases outside of the forward and backward passes, as ``plan --phases`` names them."""
        parts = set(self.encoding)
        part = parts.pop() if len(parts) == 1 else USUAL
        return [f"encode:step+{part}".removesuffix(f"+{USUAL}")] if self.encoding else []


def same(one: Any, other: Any) -> bool:
    """Return whether two values of options are equal; ``1e-4`` equals ``0.0001``, as in YAML."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    try:
        return float(one) == float(other) and isinstance(one, bool) == isinstance(other, bool)
    except (TypeError, ValueError):
        return fnmatchcase(str(other).lower(), str(one).lower())


def match(pattern: Any, value: Any, found: dict[str, str]) -> bool:
    """Return whether an option has a rule's value, and put the values of ``$name`` in ``found``."""
    if set(re.findall(r"\$(\w+)", str(pattern))) & NO_MEMORY and not isinstance(pattern, list):
        named = [one for one in str(pattern).split(",") if not _free(one)]
        return all(match(one, str(value).split(","), found) for one in named)
    if isinstance(pattern, list):
        return all(match(one, value, found) for one in pattern if not _free(one))
    if value is None or value is False:
        return pattern is value
    if not isinstance(pattern, str) or "$" not in pattern:
        return same(pattern, value)
    expression = re.sub(r"\\\$(\w+)", r"(?P<\1>.+)", re.escape(pattern))
    for text in value if isinstance(value, list) else [value]:
        if one := re.fullmatch(expression, str(text).strip(), re.I):
            found |= one.groupdict()
            return True
    return False


def agreed(rule: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the values of ``$name`` if options have all values of a rule, else None."""
    found: dict[str, str] = {}
    agrees = all(match(pattern, options.get(name), found) for name, pattern in rule.items())
    return found if agrees else None


def _free(pattern: Any) -> bool:
    """Return whether a pattern holds only numbers that do not change the memory."""
    names = set(re.findall(r"\$(\w+)", str(pattern)))
    return bool(names) and names <= NO_MEMORY


def patterns(rule: Mapping[str, Any], loose: Sequence[str] = ()) -> dict[str, Any]:
    """Return the options that a rule compares, by name; ``launch`` has those of accelerate."""
    found = flat({**rule.get("options", {}), **rule.get("launch", {})})
    return {name: one for name, one in found.items() if name not in loose and not _free(one)}
