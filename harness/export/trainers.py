"""The options of other trainers that mean what a recipe means, and what has no counterpart there.

A table a trainer in ``trainers/``, with the version that was read. What a table does not know, or
knows as missing, is named: nothing is left out in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from harness.export import rules
from harness.export.asked import defaults, numbers, parameters, techniques
from harness.resolve import Resolved
from strategies.base import BadInput, Slot
from strategies.recipe import nearest

__all__ = ["SETTINGS", "Translation", "known", "table", "translated"]

FOLDER = Path(__file__).with_name("trainers")
SETTINGS = ("micro_batch", "accumulation", "learning_rate", "betas", "eps", "weight_decay", "clip",
            "all_weights")  # fmt: skip
"""What a trainer must be told beside the techniques, in the order of its options."""
NO_OPTION = "it has no such option"
DECIDING = (Slot.PRECISION, Slot.CAST, Slot.ADAPT, Slot.RECOMPUTE, Slot.OFFLOAD, Slot.SWAP,
            Slot.OPTIMIZE, Slot.STEP)  # fmt: skip
"""Slots that decide what a training holds in memory."""


class Missing(NamedTuple):
    """What has no counterpart, and why."""

    what: str
    why: str


@dataclass
class Translation:
    """A recipe in a trainer's words. ``options``: name -> value, True where a flag stands alone.
    ``beside``: what is said elsewhere than among them. ``notes``: (what, where it differs).
    ``unplanned``: parts without a counterpart that decide the memory of the training."""

    trainer: Mapping[str, Any]
    start: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)
    notes: list[Missing] = field(default_factory=list)
    lacks: list[Missing] = field(default_factory=list)
    unplanned: list[str] = field(default_factory=list)

    def add(self, what: str, rule: rules.Rule | None, values: Mapping[str, Any]) -> None:
        """Take up what a rule says of ``what``; None: the table knows nothing of it."""
        if rule is None:
            rule = {"lacks": f"nobody has looked for it in {self.trainer['version']}"}
        found = rules.filled(rule, values)
        self.options |= found.get("options", {})
        for key, kept in (("note", self.notes), ("lacks", self.lacks)):
            if key in found:
                kept.append(Missing(what, found[key]))
        if "beside" in found:
            self.beside.append(found["beside"])
        self.start = found.get("start", self.start)


def known() -> list[str]:
    """The trainers that there are tables of."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def table(name: str) -> dict[str, Any]:
    """A trainer's table.

    Raises:
        BadInput: there is none; names the nearest.
    """
    if name not in known():
        raise BadInput(f"unknown trainer {name!r}; {nearest(name, known())}")
    return rules.read(FOLDER / f"{name}.yaml")


def translated(name: str, resolved: Resolved, config: str) -> Translation:
    """``resolved`` in the words of the trainer ``name``; ``config`` is accelerate's file."""
    trainer, launch, values = table(name), resolved.launch, numbers(resolved)
    made = Translation(trainer)
    values |= {"config": config, **_model(made, resolved)}
    made.start = rules.filled(trainer["start"], values)
    for what, rule in _found(trainer, resolved):
        made.add(what, rule, values)
        if what == launch.sharding and (rule is None or "lacks" in rule):
            made.unplanned.append(what)
    for part in techniques(resolved):
        own = {**values, **parameters(part)}
        written = trainer["strategies"].get(part.name, ())
        rule = rules.fitting(written, parameters(part), launch, defaults(part))
        unknown = {"lacks": NO_OPTION} if part.name in trainer["none"] else None
        rule = unknown if rule is None else rule
        made.add(str(part), rule, own)
        if part.slot in DECIDING and (rule is None or "lacks" in rule):
            made.unplanned.append(str(part))
    for option, why in trainer["models"].get(resolved.spec.model, {}).get("lacks", {}).items():
        if made.options.pop(option, None) is not None:
            made.lacks.append(Missing(option, why))
    return made


def _found(trainer: Mapping[str, Any], resolved: Resolved) -> Iterator[tuple[str, Any]]:
    """What a table says of the sharding, of the training's numbers, and of places left empty."""
    launch, values = resolved.launch, numbers(resolved)
    yield launch.sharding, rules.fitting(trainer["sharding"], {}, launch)
    for what in SETTINGS:
        asked = {key: value for key, value in values.items() if key in _names(trainer, what)}
        rule = rules.fitting(trainer["settings"].get(what, ()), asked, launch)
        if rule is not None:
            yield what.replace("_", " "), rule
    for place, written in trainer.get("absent", {}).items():
        if resolved.recipe.in_slot(Slot[place]) is None:
            yield f"no {place.lower()}", rules.fitting(written, {}, launch)


def _names(trainer: Mapping[str, Any], what: str) -> set[str]:
    """The numbers that the rules of a setting ask for."""
    written: Sequence[rules.Rule] = trainer["settings"].get(what, ())
    return {name for rule in written for name in rule.get("for", {})}


def _model(made: Translation, resolved: Resolved) -> dict[str, str]:
    """What the trainer calls the model, and by which script it is trained."""
    kind = "lora" if "frozen_weights" in resolved.launch.traits else "full"
    named, model = made.trainer["models"], resolved.spec.model
    words = named.get(model, {})
    found = words.get(kind, words.get("any"))
    if found is None:
        of = "an adapter of it" if kind == "lora" else "all of its weights"
        why = f"no script is known that trains {of}" if model in named else "it has no such model"
        made.lacks.append(Missing(model, f"{why}; the options are those of your own model's"))
    else:
        made.options |= rules.filled(made.trainer.get("model", {}), {"model": found})
    return {"script": found or "SCRIPT", "model": found or "MODEL"}
