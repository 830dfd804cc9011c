"""The lines of code that a recipe means, by the places where they go; or why a part has none."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import yaml

from harness import ROOT
from harness.launch import command
from harness.planner.plan.request import defaults, numbers, parameters, techniques
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from strategies.base import BadInput, Sizes, Slot
from strategies.engine import RunContext, Workload
from strategies.inventory import ResolvedConfig
from strategies.strategy import Strategy

# ---- rules ----
# Rules about strategies, kept as data: which lines of code, or which options, a part means.
#
# A table maps a strategy's name to rules, the first of which that fits is taken. The conditions of
# a rule: ``for`` (values of parameters, or lists of them), ``with`` and ``without`` (traits of the
# launch), ``device``. All else is what it means; ``$name`` there is a parameter, or a number of
# the training.
#
# A parameter that a rule neither names nor uses must have its default, or the rule does not fit:
# what a rule was not written for is never claimed by it. ``any`` names those that make no
# difference.


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
    launch: RunContext,
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


def _stands_beside(rule: Rule, launch: RunContext) -> bool:
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
    return read_folder(FOLDER)


def of_part(part: Strategy, resolved: Resolved) -> Lines:
    """The lines of a part of the recipe."""
    rule = _rule(part, resolved)
    if not rule:
        return Lines(str(part), why=f"no lines of it are kept; its code is {_home(part)}")
    values = {k: _literal(v) for k, v in {**numbers(resolved), **parameters(part)}.items()}
    found = {place: str(filled(rule[place], values)) for place in PLACES if place in rule}
    carry = tuple(ROOT / name for name in rule.get("carry", ()))
    return Lines(str(part), told(part), found, carry, rule.get("why", ""))


def _rule(part: Strategy, resolved: Resolved) -> Rule:
    """What the table says of a part; nothing where no rule was written for it."""
    found = table().get(part.name, ())
    return fitting(found, parameters(part), resolved.launch, defaults(part)) or {}


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


# ---- sizes ----
# Sizes of what is trained: an engine's buffer sizes follow from them.
#
# Where a strategy freezes, adds or replaces weights they are known once the model is edited: on
# tensors without storage, in a process of its own (``python -m harness.planner.export.lines``).


EDITED = {"frozen_weights", "replaced_layers", "quantized_weights", "other_products"}
"""Traits of recipes that train other weights than the model's own, all of them."""
TIMEOUT = 600.0


def trained_sizes(resolved: Resolved) -> Sizes:
    """Sizes in elements, of all that takes a gradient.

    Raises:
        BadInput: the model could not be edited without storage; the last line of why.
    """
    if not EDITED & resolved.launch.traits:
        return resolved.subject.sizes
    words = [sys.executable, "-m", "harness.planner.export.lines"]
    words.append(json.dumps(dataclasses.asdict(resolved.spec)))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = command.inherited() | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT
    )
    if ended.returncode:
        said = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
        raise BadInput(
            f"{resolved.recipe}: what it trains of {resolved.spec.model} could not be counted "
            f"({said[-1] if said else 'no word of why'}); take a recipe without an adapter, or "
            "another --model"
        )
    found = json.loads(ended.stdout.splitlines()[-1])
    return Sizes(**found | {"weights": tuple(found["weights"])})


def main(argv: Sequence[str]) -> int:
    """Edit the model of a spec without storage and print its sizes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from harness.planner.tracing.shortcuts import storageless
    from harness.worker.setup import Building

    resolved = resolve(Spec(**json.loads(argv[0])))
    with storageless(), FakeTensorMode(allow_non_fake_inputs=True):
        building = Building(resolved)
        building.edit()
        print(json.dumps(resolved.subject.sizes_of(building.module)._asdict()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


# ---- settling ----
# A recipe's launch file with every number in place, as text.


YAML = "accelerate.yaml"


def settle(resolved: Resolved, folder: Path) -> ResolvedConfig:
    """What the recipe's engine makes of its launch file; the files will lie in ``folder``."""
    recipe, launch = resolved.recipe, resolved.launch
    precision = recipe.in_slot(Slot.PRECISION)

    def work(scratch: Path) -> Workload:
        return Workload(
            micro_batch=resolved.micro_batch,
            clip=resolved.settings.grad_clip,
            sizes=trained_sizes(resolved),
            scratch=scratch,
            layout=launch.layout,
        )

    def configure(accelerator: Any) -> None:
        precision.configure(accelerator, None, launch)  # of the launch alone: no model is there

    word = mixed_precision(resolved)
    return launch.engine.settled(launch, work, word, configure, folder)


def as_yaml(content: Mapping[str, Any], title: str, source: str) -> str:
    """accelerate's file, with what it is above it."""
    head = "".join(f"# {line}\n" for line in (title, f"Source: {source}") if line)
    return head + yaml.safe_dump(dict(content), sort_keys=False)


def as_json(content: Mapping[str, Any]) -> str:
    """A file that the YAML names."""
    return json.dumps(content, indent=2) + "\n"
