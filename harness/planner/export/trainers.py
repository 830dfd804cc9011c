"""Options of other trainers that are equivalent to a recipe, and the parts without a counterpart.
Each trainer has a table in ``trainers/``, with the version it describes. An export lists every part
that the table lacks."""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import yaml

from harness.planner.plan.request import defaults, numbers, parameters, techniques
from harness.resolve import Resolved
from harness.subjects.library import families
from strategies.base import BadInput, Slot
from strategies.engine import RunContext
from strategies.files import own_table
from strategies.strategy import Strategy
from strategies.words import nearest

FOLDER = Path(__file__).with_name("trainers")
EXPORTED = ("ai-toolkit", "diffusers", "musubi-tuner", "onetrainer", "sd-scripts", "simpletuner")
"""Trainers whose options an export writes; the configurations of all others are only read."""
SETTINGS = ("micro_batch", "accumulation", "learning_rate", "betas", "eps", "weight_decay", "clip",
            "all_weights", "encoders", "objective")  # fmt: skip
"""Settings that a trainer needs beside the strategies, in the order of its options."""
NO_OPTION = "it has no such option"
BLANK = re.compile(r"\b[A-Z][A-Z0-9_]{3,}\b(?!-)")
"""A value within a file that only the user can fill in."""
GIVEN = re.compile(r"[A-Z][A-Z0-9_]+(?:\.\w+)?")
"""A whole value of that kind, such as AE.safetensors."""
DECIDING = (Slot.PRECISION, Slot.CAST, Slot.ADAPT, Slot.RECOMPUTE, Slot.OFFLOAD, Slot.SWAP,
            Slot.OPTIMIZE, Slot.STEP)  # fmt: skip
"""Slots that decide the memory of a training."""


# ---- rules of the tables ----
# Tables map a strategy's name to rules, of which the first that fits applies. The conditions of a
# rule are ``for`` (values of parameters, or lists of them), ``with`` and ``without`` (traits of the
# launch), ``device`` and ``models``. In all other entries ``$name`` is a parameter or a number of
# the training. ``reads`` has the strategy or the parameters that a reading of the options takes.
#
# A parameter that a rule neither names nor uses must have its default, so a rule never applies to a
# case that it was not written for. ``any`` names parameters that make no difference.


Rule = Mapping[str, Any]
CONDITIONS = ("for", "with", "without", "device", "models", "any", "reads")


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


# ---- translations ----


class Missing(NamedTuple):
    """A part without a counterpart, and the reason."""

    what: str
    why: str


@dataclass
class Translation:
    """A recipe in a trainer's options.
    ``options``: name -> value, True for a flag. ``blanks``: those that no recipe decides, as paths
    and steps. ``files``: name -> text of further files. ``beside``: settings outside the options.
    ``notes``: (part, difference). ``unplanned``: parts without a counterpart that decide the
    training's memory; ``nearest``: what the trainer can do instead. ``no_model``: why the trainer
    does not train the model; empty if it does."""

    trainer: Mapping[str, Any]
    start: str = ""
    script: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    blanks: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)
    notes: list[Missing] = field(default_factory=list)
    lacks: list[Missing] = field(default_factory=list)
    unplanned: list[str] = field(default_factory=list)
    nearest: str = ""
    no_model: str = ""

    @property
    def barred(self) -> str:
        """Why the trainer cannot train the recipe as planned; empty if it can."""
        return self.no_model or (
            f"cannot express {', '.join(self.unplanned)}: no command" if self.unplanned else ""
        )

    def add(self, what: str, rule: Rule | None, values: Mapping[str, Any]) -> None:
        """Add a rule's entries for ``what``; None: the table has no rule for it."""
        if rule is None:
            rule = {"lacks": f"not looked up in {self.trainer['version']}"}
        most = rule.get("most", {})
        scaled = {k: round(values[k] / n) for k, n in rule.get("times", {}).items()}
        scaled = {k: min(value, most.get(k, value)) for k, value in scaled.items()}
        scaled |= {k: round(values[k] / n, 4) for k, n in rule.get("share", {}).items()}
        found = filled(rule, {**values, **scaled})
        self.options |= found.get("options", {})
        self.files |= found.get("files", {})
        for key, target in (("note", self.notes), ("lacks", self.lacks)):
            if key in found:
                target.append(Missing(what, found[key]))
        for key, value in found.get("launch", {}).items():
            self.beside.append(f"in the exported launch files: {key.lstrip('-')} = {value}")
        self.start = found.get("start", self.start)


@functools.cache
def options(name: str, script: str = "") -> dict[str, dict[str, Any]]:
    """Return each option of a trainer's script, as its source declares it; empty if not read."""
    file = options_file(name)
    if not file.exists():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    own = found.get("scripts", {})
    named = [one for path, one in own.items() if path == script or path.endswith(f"/{script}")]
    some = named[:1] if script else own.values()
    declared = dict(found["options"])
    for one in some:
        declared |= {name: option for name, option in one.items() if option or script}
    return {name: option for name, option in declared.items() if option}


def known() -> list[str]:
    """Return the trainers that have a table."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def options_file(name: str) -> Path:
    """Return the file with a trainer's options, which ``docs/make/trainer_options.py`` makes."""
    return FOLDER.with_name("options") / f"{name}.json"


@functools.cache
def table(name: str) -> dict[str, Any]:
    """Read a trainer's table, with the defaults that its own parser declares.

    Raises:
        BadInput: there is none; names the nearest.
    """
    if name not in known():
        raise BadInput(f"unknown trainer {name!r}; {nearest(name, known())}")
    found, made = own_table(FOLDER / f"{name}.yaml"), options(name)
    defaults = {kind: dict(some) for kind, some in found["defaults"].items()}
    for kind, names in found.get("declared", {}).items():
        usual = {one: [made[one].get("default", False), made[one]["at"]] for one in names}
        defaults[kind] = {**usual, **defaults.get(kind, {})}
    return {**found, "name": name, "defaults": defaults}


def exported(name: str) -> dict[str, Any]:
    """Read the table of a trainer whose options an export writes.

    Raises:
        BadInput: it is unknown, or only read.
    """
    if name in known() and name not in EXPORTED:
        some = ", ".join(EXPORTED)
        raise BadInput(f"trainers has {name!r}, which plan --from reads alone; one of {some}")
    return table(name)


def has(name: str, row: Resolved) -> bool:
    """Return True if a trainer has the model of ``row``, and options for all of its parts."""
    kind = "lora" if "frozen_weights" in row.launch.traits else "full"
    words = table(name)["models"].get(row.spec.model, {})
    return bool({kind, "any"} & set(words)) and not translated(name, row, "").unplanned


def translated(name: str, resolved: Resolved, config: str) -> Translation:
    """Translate ``resolved`` for the trainer ``name``; ``config`` is accelerate's file."""
    trainer, launch, values = table(name), resolved.launch, numbers(resolved)
    made = Translation(trainer)
    devices = ",".join(map(str, range(launch.processes)))
    values |= {"config": config, "devices": devices, **_model(made, resolved)}
    values |= {"groups": launch.layout.replicate, "shards": launch.layout.shard}
    made.start, made.script = filled(trainer["start"], values), values["script"].split()[0]
    shape, size = trainer["shape"], resolved.subject.size_in_words
    keys = ["sides" if "sides" in shape else "resolution", "area"]
    keys += ["frames"] if " frames" in size else []
    some = (shape.get(key, []) for key in keys)
    names = [n for one in some for n in ([one] if isinstance(one, str) else one)]
    flag = "--" if trainer["form"] == "flags" and "files" not in shape else ""
    named = ", ".join(f"`{flag}{name.removeprefix(flag)}`" for name in names)
    made.beside.append(f"samples of at most {size}, as planned; set {named}")
    first = trainer["models"].get(resolved.spec.model, {}).get("first", trainer.get("first"))
    if first:
        made.beside.insert(0, filled(first, {"scripts": made.script.partition("train")[0]}))
    for what, part, rule in ruled(trainer, resolved):
        made.add(what, rule, values if part is None else {**values, **parameters(part)})
        deciding = part.slot in DECIDING if part else what in (launch.sharding, "micro batch")
        if deciding and (rule is None or "lacks" in rule):
            made.unplanned.append(what)
    for option, why in trainer["models"].get(resolved.spec.model, {}).get("lacks", {}).items():
        if made.options.pop(option, None) is not None:
            made.lacks.append(Missing(option, why))
    if not made.no_model:
        _complete(made, resolved, values)
    return made


def _complete(made: Translation, resolved: Resolved, values: Mapping[str, Any]) -> None:
    """Add what the trainer demands beyond the recipe: names, sizes, paths and steps."""
    trainer, subject = made.trainer, resolved.subject
    space, down = subject.space, subject.factor
    height, width = space.height * down, space.width * down
    side, frames = math.isqrt(height * width) // 16 * 16, subject.family.frames_of(space.frames)
    hub = families.table()[resolved.spec.model].hub[0]
    sizes = {"height": height, "width": width, "side": side, "frames": frames, "hub": hub}
    values = {**values, **sizes}
    videos = trainer.get("videos", {}) if frames > 1 else {}
    own = trainer["models"].get(resolved.spec.model, {})
    asked = {**trainer.get("blanks", {}), **videos.get("blanks", {}), **own.get("blanks", {})}
    declared = options(trainer["name"], made.script) if made.script.endswith(".py") else {}
    made.blanks = {name: filled(value, values) for name, value in asked.items()
                   if not declared or name in declared}  # fmt: skip
    for name, text in trainer.get("files", {}).items():
        for one, other in {**videos.get("replace", {}), **own.get("replace", {})}.items():
            text = text.replace(one, other)
        made.files[name] = filled(text, values)


def ruled(
    trainer: Mapping[str, Any], resolved: Resolved
) -> Iterator[tuple[str, Strategy | None, Rule | None]]:
    """Yield the table's rules for the sharding, the training's numbers, empty slots and strategies.
    Each has its name, and the strategy if it is one. The rule is None if the table has none."""
    launch, values = resolved.launch, numbers(resolved)
    yield launch.sharding, None, fitting(trainer["sharding"], {}, launch)
    for what in SETTINGS:
        written = trainer["settings"].get(what, ())
        compared = {name for rule in written for name in rule.get("for", {})}
        asked = {key: value for key, value in values.items() if key in compared}
        rule = fitting(written, asked, launch)
        if rule is not None:
            yield what.replace("_", " "), None, rule
    for place, written in trainer.get("absent", {}).items():
        if resolved.recipe.in_slot(Slot[place]) is None:
            yield f"no {place.lower()}", None, fitting(written, {}, launch)
    for part in techniques(resolved):
        written = trainer["strategies"].get(part.name, ())
        rule = fitting(written, parameters(part), launch, defaults(part))
        none = {"lacks": NO_OPTION} if part.name in trainer["none"] else None
        yield str(part), part, none if rule is None else rule


def _model(made: Translation, resolved: Resolved) -> dict[str, str]:
    """Return the trainer's name of the model, and the script that trains it."""
    kind = "lora" if "frozen_weights" in resolved.launch.traits else "full"
    named, model = made.trainer["models"], resolved.spec.model
    words, adapter = named.get(model, {}), resolved.recipe.in_slot(Slot.ADAPT)
    found = words.get(kind, words.get("any"))
    found = words.get(adapter.name, found) if adapter else found
    if found is None:
        what = "an adapter of it" if kind == "lora" else "all of its weights"
        why = f"no script is known that trains {what}" if model in named else "it has no such model"
        made.no_model = f"{model}: {why}"
    else:
        made.options |= filled(made.trainer.get("model", {}), {"model": found})
        flavours = words.get("flavours", [""])
        made.options |= {"model_flavour": flavours[0]} if flavours and "" not in flavours else {}
    return {"script": found or "SCRIPT", "model": found or "MODEL"}


def page(title: str, translations: Sequence[Translation]) -> str:
    """Return all sections under the title."""
    head = (
        f"# {title}\n\nWhat means the same in other trainers. Each option was read in the "
        "source named with it; another version may differ. What has no counterpart is named.\n"
    )
    without = [made.trainer["title"] for made in translations if made.no_model]
    last = [f"It is no model of {', '.join(without)}.\n"] if without else []
    return "\n".join([head, *(section(m) for m in translations if not m.no_model), *last])


def section(made: Translation) -> str:
    """Return the section of one trainer that has the model."""
    about = made.trainer
    read = "".join(f"- `{path}`\n" for path in about["read"])
    if made.barred:
        why = made.barred.removesuffix(": no command")
        nearest = f" {made.nearest[0].upper()}{made.nearest[1:]}.\n" if made.nearest else "\n"
        return f"## {about['title']}\n\nNo command: {why}.{nearest}"
    parts = [f"## {about['title']}\n", written(made)]
    blanks = [f"`{name}`" for name, value in made.blanks.items() if GIVEN.fullmatch(str(value))]
    blanks += [f"`{blank}` in {name}" for name, text in made.files.items()
               for blank in dict.fromkeys(BLANK.findall(text))]  # fmt: skip
    blanks += [f"`{n}` {v}" for n, v in made.blanks.items() if re.search("steps|epochs", n)]
    lists = {"Fill in": blanks, "Beside these": made.beside}
    for title, missing in {"Where it differs": made.notes, "No counterpart": made.lacks}.items():
        lists[title] = [f"`{what}`: {why}" for what, why in missing]
    for title, lines in lists.items():
        parts += ["".join([f"{title}:\n\n", *(f"- {line}\n" for line in lines)])] if lines else []
    declared = options(about["name"], made.script)
    found = [(name, declared[name]) for name in made.options if name in declared]
    rows = [f"| `{name}` | {one['at']} | {one.get('help', '')} |\n" for name, one in found]
    head = "| Option | Where it is declared | The trainer's own help |\n|---|---|---|\n"
    parts += ["".join([head, *rows])] if rows else []
    where = f"Read: {about['repository']} at {about['commit']} ({about['version']}):\n\n{read}"
    return "\n".join([*parts, where])


def written(made: Translation) -> str:
    """Return the command and the files in the trainer's formats, as code blocks."""
    given, form, start = {**made.options, **made.blanks}, made.trainer["form"], made.start
    for name, value in given.items() if form == "flags" else ():
        # A flag alone if the value is True, several values for a list.
        values = [] if value is True else value if isinstance(value, list) else [value]
        start += " \\\n    " + shlex.join([name, *map(str, values)])
    blocks = [_block("", "sh", start)]
    if form != "flags":
        root, head = made.trainer.get("root", ""), made.trainer.get("head", {})
        nested = _nested({**head, **{root + name: value for name, value in given.items()}})
        if form == "json":
            text = json.dumps(nested, indent=2)
        elif form == "toml":  # the keys of the file, then its tables; values are as in JSON
            tables = _nested({k: v for k, v in given.items() if "." in k})
            rows = [f"{k} = {json.dumps(v)}" for k, v in given.items() if "." not in k]
            for table, keys in tables.items():
                rows += ["", f"[{table}]", *(f"{k} = {json.dumps(v)}" for k, v in keys.items())]
            text = "\n".join(rows)
        else:
            text = yaml.safe_dump(nested, sort_keys=False).rstrip()
        blocks.append(_block(made.trainer["file"], form, text))
    blocks += [_block(n, n.rpartition(".")[2], t.rstrip()) for n, t in made.files.items()]
    return "\n".join(blocks)


def _block(name: str, kind: str, text: str) -> str:
    """Return a code block, under the name of its file if it has one."""
    return (f"{name}:\n\n" if name else "") + f"```{kind}\n{text}\n```\n"


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings: ``train.lr`` is a key within a key; a number counts in a list."""
    made: dict[str, Any] = {}
    for name, value in options.items():
        *above, last = name.split(".")
        block = made
        for key in above:
            block = block.setdefault(key, {})
        block[last] = value
    return _lists(made)


def _lists(block: Any) -> Any:
    """Replace mappings whose keys are all numbers by lists."""
    if not isinstance(block, dict):
        return block
    held = {key: _lists(value) for key, value in block.items()}
    return list(held.values()) if held and all(k.isdigit() for k in held) else held
