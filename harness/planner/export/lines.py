"""Code lines of a recipe's strategies by their place in a trainer, and its launch file with all
numbers resolved.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import yaml

from harness import ROOT
from harness.launch import command
from harness.planner.adapters import adapter_of
from harness.planner.adapters.base import ResolvedConfig
from harness.planner.plan.request import defaults, numbers, parameters, techniques
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from strategies.base import BadInput, Sizes, Slot
from strategies.engine import RunContext, Workload
from strategies.files import own_table
from strategies.strategy import Strategy
from strategies.subject import LAYERS

# ---- rules ----
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

    ``values`` are the values that ``for`` compares, by name. ``usual`` are defaults: a rule
    must cover a value that differs from them.
    """
    for rule in rules:
        asked = all(_answers(rule, name, values, usual or {}) for name in values)
        if asked and _stands_beside(rule, launch):
            return {key: value for key, value in rule.items() if key not in CONDITIONS}
    return None


def _stands_beside(rule: Rule, launch: RunContext) -> bool:
    wanted, unwanted = set(rule.get("with", ())), set(rule.get("without", ()))
    device = rule.get("device", launch.device)
    named = device == launch.device and (
        "models" not in rule or launch.subject.model in rule["models"]
    )
    return named and wanted <= launch.traits and not unwanted & launch.traits


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


FOLDER = Path(__file__).with_name("lines")
PLACES = (
    "imports", "functions", "settings", "accelerator", "handlers", "model", "optimizer",
    "prepared", "backward", "gradients", "stepped",
)  # fmt: skip
"""Places of lines, in the order of a script.

"accelerator" and "handlers" are arguments of ``Accelerator``, "model" comes before prepare, and
"stepped" after each optimizer step.
"""


@dataclass(frozen=True)
class Lines:
    """The code lines of one strategy.

    ``of``: the strategy as a recipe spells it. ``places``: place -> lines. ``carry``: files of
    this project that import no other of it. ``why``: the reason if there are no lines.
    """

    of: str
    says: str = ""
    places: Mapping[str, str] = field(default_factory=dict)
    carry: tuple[Path, ...] = ()
    why: str = ""


@functools.cache
def table() -> dict[str, Any]:
    """Return strategy -> rules, of all files."""
    return {name: rules for p in sorted(FOLDER.glob("*.yaml")) for name, rules in read(p).items()}


def of_part(part: Strategy, resolved: Resolved) -> Lines:
    """Return the lines of one strategy of the recipe."""
    rule = _rule(part, resolved)
    if not rule:
        home = type(part).__module__.replace(".", "/") + ".py"
        return Lines(str(part), why=f"no lines of it are kept; its code is {home}")
    layers = {f"{layer}_names": names.pattern for layer, names in LAYERS.items()}
    given = {**numbers(resolved), **layers, **parameters(part)}
    values = {k: _literal(v) for k, v in given.items()}
    found = {place: str(filled(rule[place], values)) for place in PLACES if place in rule}
    carry = tuple(ROOT / name for name in rule.get("carry", ()))
    return Lines(str(part), told(part), found, carry, rule.get("why", ""))


def _rule(part: Strategy, resolved: Resolved) -> Rule:
    found = table().get(part.name, ())
    return fitting(found, parameters(part), resolved.launch, defaults(part)) or {}


def lines_of(resolved: Resolved) -> list[Lines]:
    """Return the lines of each strategy in the order in which they apply, then gradient clipping.

    The sharding has lines only if its launch file is not enough.
    """
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
    # Read the model's parameters again: sharding has replaced them.
    call = f"accelerator.clip_grad_norm_(model.parameters(), {clip})"
    text = f"if accelerator.sync_gradients:\n    {call}\n"
    yield Lines(f"grad_clip {clip:g}", "Clips the gradients' norm", {"gradients": text})


def mixed_precision(resolved: Resolved) -> str:
    """Return accelerate's word for the recipe's precision: no, bf16 or fp16.

    A rule gives the word, because a strategy may need torch for it; without a rule the strategy
    does.
    """
    part = resolved.recipe.in_slot(Slot.PRECISION)
    rule = _rule(part, resolved)
    if "mixed_precision" in rule:
        return rule["mixed_precision"]
    return part.accelerator_kwargs(resolved.launch).get("mixed_precision", "no")


def told(part: Strategy) -> str:
    """Return the first sentence of a strategy's docstring."""
    text = " ".join((type(part).__doc__ or "").replace("``", "").split())
    return text.partition(". ")[0].rstrip(".")


def _literal(value: Any) -> str:
    """Return ``value`` as a Python literal; digits in a text become a number."""
    spelt = isinstance(value, str) and not value.isdigit()
    return json.dumps(value) if spelt else str(value)


# ---- sizes of trained weights ----
# An engine's buffer sizes follow from them. If a strategy freezes, adds or replaces weights, the
# model is edited on tensors without storage, in its own process (``python -m
# harness.planner.export.lines``).


EDITED = {"frozen_weights", "replaced_layers", "quantized_weights", "other_products"}
"""Traits of recipes that do not train all of the model's own weights."""
TIMEOUT = 600.0


def trained_sizes(resolved: Resolved) -> Sizes:
    """Return the sizes, in elements, of all weights with a gradient.

    Raises:
        BadInput: the model could not be edited without storage; has the last line of the error.
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
            f"{resolved.recipe}: the trained parameters of {resolved.spec.model} could "
            f"not be counted ({said[-1] if said else 'no message'}); take a recipe "
            "without an adapter, or another --model"
        )
    found = json.loads(ended.stdout.splitlines()[-1])
    return Sizes(**found | {"weights": tuple(found["weights"])})


def main(argv: Sequence[str]) -> int:
    """Edit a spec's model without storage and print its sizes."""
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


# ---- launch files ----
# A recipe's launch file as text, with every number resolved.


YAML = "accelerate.yaml"


def settle(resolved: Resolved, folder: Path) -> ResolvedConfig:
    """Return the engine's resolved launch file; the files will be in ``folder``."""
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
        precision.configure(accelerator, None, launch)  # by the launch alone, without a model

    word = mixed_precision(resolved)
    adapter = adapter_of(launch.engine)
    return adapter.resolved_config(launch, work, word, configure, folder)


def as_yaml(content: Mapping[str, Any], title: str, source: str) -> str:
    """Return accelerate's file, with its title and source as comments."""
    head = "".join(f"# {line}\n" for line in (title, f"Source: {source}") if line)
    return head + yaml.safe_dump(dict(content), sort_keys=False)


def as_json(content: Mapping[str, Any]) -> str:
    """Return the text of a file that the YAML names."""
    return json.dumps(content, indent=2) + "\n"
