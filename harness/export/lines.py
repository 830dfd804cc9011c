"""The lines of code that a recipe means, by the places where they go; or why a part has none."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.export import rules
from harness.export.asked import defaults, numbers, parameters, techniques
from harness.resolve import Resolved
from strategies.base import Slot
from strategies.strategy import Strategy

__all__ = ["PLACES", "Lines", "lines_of", "mixed_precision", "of_part", "told"]

FOLDER = Path(__file__).with_name("lines")
PLACES = (
    "imports", "functions", "settings", "accelerator", "handlers", "model", "optimizer",
    "prepared", "backward", "gradients", "stepped",
)  # fmt: skip
"""Where lines go, in the order of a script: "accelerator" and "handlers" are arguments of
``Accelerator``, "model" comes before prepare, "stepped" behind each optimizer step."""


@dataclass(frozen=True)
class Lines:
    """What one part means. ``of``: the part as a recipe spells it. ``places``: place -> lines.
    ``carry``: files of this project that need no other of it. ``why``: the sentence of a part
    that is no code, or that is not a few lines."""

    of: str
    says: str = ""
    places: Mapping[str, str] = field(default_factory=dict)
    carry: tuple[Path, ...] = ()
    why: str = ""


@functools.cache
def table() -> dict[str, Any]:
    """Strategy -> rules."""
    return rules.read_folder(FOLDER)


def of_part(part: Strategy, resolved: Resolved) -> Lines:
    """The lines of a part of the recipe."""
    rule = _rule(part, resolved)
    if not rule:
        return Lines(str(part), why=f"no lines of it are kept; its code is {_home(part)}")
    values = {k: _literal(v) for k, v in {**numbers(resolved), **parameters(part)}.items()}
    found = {place: str(rules.filled(rule[place], values)) for place in PLACES if place in rule}
    carry = tuple(ROOT / name for name in rule.get("carry", ()))
    return Lines(str(part), told(part), found, carry, rule.get("why", ""))


def _rule(part: Strategy, resolved: Resolved) -> rules.Rule:
    """What the table says of a part; nothing where no rule was written for it."""
    found = table().get(part.name, ())
    return rules.fitting(found, parameters(part), resolved.launch, defaults(part)) or {}


def lines_of(resolved: Resolved) -> list[Lines]:
    """Those of the sharding where its launch file does not say all, of every other part in the
    order in which they are applied, and those that the training's own numbers ask for."""
    sharding = resolved.recipe.in_slot(Slot.SHARD)
    launched = [sharding] if sharding.name in table() else []
    parts = [*launched, *techniques(resolved)]
    return [*(of_part(part, resolved) for part in parts), *_clipping(resolved)]


def _clipping(resolved: Resolved) -> Iterable[Lines]:
    clip = resolved.settings.grad_clip
    if not clip:
        return
    if "own_clipping" in resolved.launch.traits:
        yield Lines(f"grad_clip {clip:g}", why="a setting of the launch file; the engine clips")
        return
    # The model's, asked for anew: what is sharded has other parameters than before.
    call = f"accelerator.clip_grad_norm_(model.parameters(), {clip})"
    text = f"if accelerator.sync_gradients:\n    {call}\n"
    yield Lines(f"grad_clip {clip:g}", "Clips the gradients' norm", {"gradients": text})


def mixed_precision(resolved: Resolved) -> str:
    """accelerate's word for the recipe's precision: no, bf16 or fp16. By a rule, since a strategy
    may need torch to say it; a strategy that has none is asked."""
    part = resolved.recipe.in_slot(Slot.PRECISION)
    rule = _rule(part, resolved)
    if "mixed_precision" in rule:
        return rule["mixed_precision"]
    return part.accelerator_kwargs(resolved.launch).get("mixed_precision", "no")


def told(part: Strategy) -> str:
    """The first sentence of a strategy's docstring."""
    text = " ".join((type(part).__doc__ or "").replace("``", "").split())
    return text.partition(". ")[0].rstrip(".")


def _home(part: Strategy) -> str:
    """The file of a strategy, from the project's root."""
    return type(part).__module__.replace(".", "/") + ".py"


def _literal(value: Any) -> str:
    """``value`` as Python writes it; a number where a parameter takes words and numbers."""
    spelt = isinstance(value, str) and not value.isdigit()
    return json.dumps(value) if spelt else str(value)
