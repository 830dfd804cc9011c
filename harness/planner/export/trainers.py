"""Options of other trainers that are equivalent to a recipe, and the parts without a counterpart.

Each trainer has a table in ``trainers/``, with the version it describes. An export lists every
part that the table lacks.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from harness.planner.export import rules
from harness.planner.plan.request import defaults, numbers, parameters, techniques
from harness.resolve import Resolved
from strategies.base import BadInput, Slot
from strategies.strategy import Strategy
from strategies.words import nearest

FOLDER = Path(__file__).with_name("trainers")
EXPORTED = ("ai-toolkit", "diffusers", "musubi-tuner", "onetrainer", "sd-scripts", "simpletuner")
"""Trainers whose options an export writes; the configurations of all others are only read."""
SETTINGS = ("micro_batch", "accumulation", "learning_rate", "betas", "eps", "weight_decay", "clip",
            "all_weights", "encoders", "objective")  # fmt: skip
"""Settings that a trainer needs beside the strategies, in the order of its options."""
NO_OPTION = "it has no such option"
DECIDING = (Slot.PRECISION, Slot.CAST, Slot.ADAPT, Slot.RECOMPUTE, Slot.OFFLOAD, Slot.SWAP,
            Slot.OPTIMIZE, Slot.STEP)  # fmt: skip
"""Slots that decide the memory of a training."""


class Missing(NamedTuple):
    """A part without a counterpart, and the reason."""

    what: str
    why: str


@dataclass
class Translation:
    """A recipe in a trainer's options.

    ``options``: name -> value, True for a flag. ``beside``: settings outside the options.
    ``notes``: (part, difference). ``unplanned``: parts without a counterpart that decide the
    training's memory. ``no_model``: why the trainer does not train the model; empty if it does.
    """

    trainer: Mapping[str, Any]
    start: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)
    notes: list[Missing] = field(default_factory=list)
    lacks: list[Missing] = field(default_factory=list)
    unplanned: list[str] = field(default_factory=list)
    no_model: str = ""

    @property
    def barred(self) -> str:
        """Why the trainer cannot train the recipe as planned; empty if it can."""
        return self.no_model or (
            f"cannot express {', '.join(self.unplanned)}: no command" if self.unplanned else ""
        )

    def add(self, what: str, rule: rules.Rule | None, values: Mapping[str, Any]) -> None:
        """Add a rule's entries for ``what``; None: the table has no rule for it."""
        if rule is None:
            rule = {"lacks": f"not looked up in {self.trainer['version']}"}
        most = rule.get("most", {})
        scaled = {k: round(values[k] / n) for k, n in rule.get("times", {}).items()}
        scaled = {k: min(value, most.get(k, value)) for k, value in scaled.items()}
        scaled |= {k: round(values[k] / n, 4) for k, n in rule.get("share", {}).items()}
        found = rules.filled(rule, {**values, **scaled})
        self.options |= found.get("options", {})
        for key, kept in (("note", self.notes), ("lacks", self.lacks)):
            if key in found:
                kept.append(Missing(what, found[key]))
        for key, value in found.get("dataset", {}).items():
            self.beside.append(f"in the dataset's .toml, under [general]: {key} = {value}")
        for key, value in found.get("launch", {}).items():
            self.beside.append(f"in the exported launch files: {key.lstrip('-')} = {value}")
        self.start = found.get("start", self.start)


def known() -> list[str]:
    """Return the trainers that have a table."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def table(name: str) -> dict[str, Any]:
    """Read a trainer's table.

    Raises:
        BadInput: there is none; names the nearest.
    """
    if name not in known():
        raise BadInput(f"unknown trainer {name!r}; {nearest(name, known())}")
    return rules.read(FOLDER / f"{name}.yaml")


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
    made.start = rules.filled(trainer["start"], values)
    made.beside += _sample(trainer, resolved)
    for what, part, rule in ruled(trainer, resolved):
        made.add(what, rule, values if part is None else {**values, **parameters(part)})
        deciding = part.slot in DECIDING if part else what in (launch.sharding, "micro batch")
        if deciding and (rule is None or "lacks" in rule):
            made.unplanned.append(what)
    for option, why in trainer["models"].get(resolved.spec.model, {}).get("lacks", {}).items():
        if made.options.pop(option, None) is not None:
            made.lacks.append(Missing(option, why))
    return made


def _sample(trainer: Mapping[str, Any], resolved: Resolved) -> list[str]:
    """Return a line with the size of the planned samples, and the options that decide it."""
    shape, size = trainer["shape"], resolved.subject.size_in_words
    keys = ["sides" if "sides" in shape else "resolution", "area"]
    keys += ["frames"] if " frames" in size else []
    values = (shape.get(key, []) for key in keys)
    names = [n for value in values for n in ([value] if isinstance(value, str) else value)]
    flag = "--" if trainer["form"] == "flags" and "files" not in shape else ""
    named = ", ".join(f"`{flag}{name.removeprefix(flag)}`" for name in names)
    return [f"samples of at most {size}, as planned; set {named}"]


def ruled(
    trainer: Mapping[str, Any], resolved: Resolved
) -> Iterator[tuple[str, Strategy | None, rules.Rule | None]]:
    """Yield the table's rules for the sharding, the training's numbers, empty slots and strategies.

    Each has its name, and the strategy if it is one. The rule is None if the table has none.
    """
    launch = resolved.launch
    yield from ((what, None, rule) for what, rule in _found(trainer, resolved))
    for part in techniques(resolved):
        written = trainer["strategies"].get(part.name, ())
        rule = rules.fitting(written, parameters(part), launch, defaults(part))
        none = {"lacks": NO_OPTION} if part.name in trainer["none"] else None
        yield str(part), part, none if rule is None else rule


def _found(trainer: Mapping[str, Any], resolved: Resolved) -> Iterator[tuple[str, Any]]:
    """Yield the table's rules for the sharding, the training's numbers, and empty slots."""
    launch, values = resolved.launch, numbers(resolved)
    yield launch.sharding, rules.fitting(trainer["sharding"], {}, launch)
    for what in SETTINGS:
        written = trainer["settings"].get(what, ())
        compared = {name for rule in written for name in rule.get("for", {})}
        asked = {key: value for key, value in values.items() if key in compared}
        rule = rules.fitting(written, asked, launch)
        if rule is not None:
            yield what.replace("_", " "), rule
    for place, written in trainer.get("absent", {}).items():
        if resolved.recipe.in_slot(Slot[place]) is None:
            yield f"no {place.lower()}", rules.fitting(written, {}, launch)


def _model(made: Translation, resolved: Resolved) -> dict[str, str]:
    """Return the trainer's name of the model, and the script that trains it."""
    kind = "lora" if "frozen_weights" in resolved.launch.traits else "full"
    named, model = made.trainer["models"], resolved.spec.model
    words = named.get(model, {})
    found = words.get(kind, words.get("any"))
    if found is None:
        of = "an adapter of it" if kind == "lora" else "all of its weights"
        why = f"no script is known that trains {of}" if model in named else "it has no such model"
        made.no_model = f"{model}: {why}"
    else:
        made.options |= rules.filled(made.trainer.get("model", {}), {"model": found})
        flavours = words.get("flavours", [""])
        made.options |= {"model_flavour": flavours[0]} if flavours and "" not in flavours else {}
    return {"script": found or "SCRIPT", "model": found or "MODEL"}


# ---- trainers.md ----


def page(title: str, translations: Sequence[Translation]) -> str:
    """Return all sections under the title."""
    head = (
        f"# {title}\n\nWhat means the same in other trainers. Each option was looked up in the "
        "source named with it; another version may differ. What has no counterpart is named.\n"
    )
    return "\n".join([head, *(section(each) for each in translations)])


def section(made: Translation) -> str:
    """Return the section of one trainer."""
    about = made.trainer
    read = "".join(f"- `{path}`\n" for path in about["read"])
    if made.barred:
        return f"## {about['title']}\n\nNo command: {made.barred.removesuffix(': no command')}.\n"
    parts = [f"## {about['title']}\n", written(made)]
    parts.append(_listed("Beside these", made.beside))
    parts.append(_told("Where it differs", made.notes))
    parts.append(_told("No counterpart", made.lacks))
    parts.append(_evidence(made))
    where = f"Read: {about['repository']} at {about['commit']} ({about['version']}):\n\n{read}"
    return "\n".join([*(part for part in parts if part), where])


def _evidence(made: Translation) -> str:
    """Return a table of each option's meaning in the trainer's source, if known."""
    known = made.trainer.get("evidence", {})
    rows = [f"| `{name}` | {known[name]} |" for name in made.options if name in known]
    head = ["| Option | Where it is read, and what it does |", "|---|---|"]
    return "\n".join([*head, *rows]) + "\n" if rows else ""


def written(made: Translation) -> str:
    """Return the options in the trainer's format, as a code block."""
    if made.trainer["form"] == "flags":
        flags = "".join(f" \\\n    {line}" for line in _flags(made.options))
        return f"```sh\n{made.start}{flags}\n```\n"
    start, file = made.start, made.trainer["file"]
    if made.trainer["form"] == "json":
        text, kind = json.dumps(_nested(made.options), indent=2), "json"
    elif made.trainer["form"] == "toml":
        text, kind = _toml(made.options), "toml"
    else:
        text, kind = yaml.safe_dump(_nested(made.options), sort_keys=False).rstrip(), "yaml"
    return f"```sh\n{start}\n```\n\n{file}:\n\n```{kind}\n{text}\n```\n"


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Return ``--name value`` lines; a flag alone if it is True, several values for a list."""
    lines = []
    for name, value in options.items():
        given = [] if value is True else value if isinstance(value, list) else [value]
        lines.append(shlex.join([name, *map(str, given)]))
    return lines


def _toml(options: Mapping[str, Any]) -> str:
    """Return the keys of the file, then its tables; values are written as in JSON."""
    made = {name: value for name, value in options.items() if "." not in name}
    lines = [f"{name} = {json.dumps(value)}" for name, value in made.items()]
    for table, keys in _nested({k: v for k, v in options.items() if "." in k}).items():
        lines += ["", f"[{table}]", *(f"{name} = {json.dumps(v)}" for name, v in keys.items())]
    return "\n".join(lines)


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings: ``train.lr`` is a key within a key."""
    made: dict[str, Any] = {}
    for name, value in options.items():
        *above, last = name.split(".")
        block = made
        for key in above:
            block = block.setdefault(key, {})
        block[last] = value
    return made


def _told(title: str, things: Sequence[Missing]) -> str:
    return _listed(title, [f"`{what}`: {why}" for what, why in things])


def _listed(title: str, lines: Sequence[str]) -> str:
    return f"{title}:\n\n" + "".join(f"- {line}\n" for line in lines) if lines else ""
