"""Recipe and spec of a trainer's own configuration: the tables of an export, read backwards.
A configuration is read as the recipe whose export is that configuration. Each rule whose options
agree proposes its strategy. Of the combinations, the one whose rules differ least counts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from harness.planner import resident_models
from harness.planner.export import launches, trainers
from harness.planner.export.files import DATASET, LINKS, Found, flat
from harness.planner.export.launches import COUNTS
from harness.planner.export.matching import Reading, agreed, match, patterns, same
from harness.planner.export.models import PATHS, model_of, read_sample, sample_options
from harness.planner.verdict import Uncounted
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from harness.subjects import kind_of, usual_objective
from strategies import CATALOG
from strategies.base import BadInput, Reason, Slot

ADAPTERS = ("lora", "peft", "lyco", "--lora", "--network", "--rank", "network")
"""Beginnings of options that only adapters have."""
TOGETHER = (Slot.PRECISION, Slot.ADAPT)
"""Slots whose rules depend on one another."""
CHOICES = {"dtype": ("model", "fp32"), "autocast": (False, True)}
"""Parameters of these slots that rules tell apart by their differences, not by an option."""
MESH = ("groups", "shards")
"""Numbers of a trainer's options whose product is the number of processes."""
SAVING = (Slot.RECOMPUTE, Slot.OFFLOAD, Slot.SWAP, Slot.CAST)
"""Slots whose strategies save memory: without one the prediction is too large."""
AVERAGE = 0.999
"""Decay of an average of the weights; its value changes no memory."""


def reading(found: Sequence[Found], model: str = "", processes: int | None = None) -> Reading:
    """Return the recipe of the files' settings.

    Args:
        found: the files (``harness.planner.export.files.read``).
        model: replaces the files' model.
        processes: replaces the files' number of GPUs.

    Raises:
        BadInput: files of two trainers, an unknown model, or a setting without a meaning.
    """
    kinds = list(dict.fromkeys(one.kind for one in found if one.kind in trainers.known()))
    if len(kinds) > 1:
        raise BadInput(f"{found[0].path}: files of {' and '.join(kinds)}; give those of one")
    launch = launches.launch_of(found, processes)
    if not kinds:
        return _of_launch(found, launch, model)
    return Reader(kinds[0], found, launch, model).read()


def _of_launch(found: Sequence[Found], launch: launches.Launch, model: str) -> Reading:
    """Return the reading of accelerate's and DeepSpeed's files alone."""
    if all(one.kind == DATASET for one in found):
        raise BadInput(f"{found[0].path} has datasets alone; give the trainer's file first")
    if not model:
        raise BadInput(f"{found[0].path} names no model; give --model NAME")
    made = Reading(trainer="accelerate", model=model)
    made.processes, made.unpredicted = launch.processes, [*launch.unpredicted]
    made.means = [("launch", text) for text in launch.means]
    made.micro_batch, made.accumulation = launch.micro_batch, launch.accumulation
    steps = [f"accumulate:steps={made.accumulation}"] if made.accumulation > 1 else []
    remarks = [told for one in found for told in one.remarks]
    usual = "AdamW, no checkpointing and no averages unless named above"
    made.assumed = [*launch.assumed, *remarks, usual]
    half = launch.precision if launch.precision not in ("", "no") else "fp32"
    parts = [half, *launch.parts, *steps]
    while True:
        recipe = "+".join((launch.sharding, *parts))
        try:
            resolved = resolve(_spec(made, recipe))
            refused = resolved.refusal
        except BadInput as error:
            refused = error.reason
        if refused is None:
            made.recipe = str(resolved.recipe)
            return made
        about = refused.about or str(refused).partition(":")[0]
        culprit = next((part for part in launch.parts if part in parts
                        and part.partition(":")[0] == about), None)  # fmt: skip
        if culprit is None:
            raise BadInput(f"{found[0].path}: {refused}")
        parts.remove(culprit)
        made.unpredicted.append(Uncounted(culprit, f"this is left out: {refused}", "less"))


def _spec(made: Reading, recipe: str) -> Spec:
    kind = kind_of(made.model)
    data = "synthetic" if kind.brings_samples else "synthetic:32"
    return Spec(
        recipe=recipe,
        model=made.model,
        data=data,
        objective=usual_objective(made.model),
        device="cuda",
        processes=made.processes,
        global_batch=made.global_batch,
        ema=made.average,
    )


@dataclass(frozen=True)
class _Option:
    """A strategy that a rule proposes for the options that it compares.
    ``note``: how the trainer differs, of one that ``read_as`` sets."""

    name: str
    parameters: Mapping[str, Any]
    options: Mapping[str, Any]
    lacks: bool = False
    note: str = ""

    @property
    def slot(self) -> Slot:
        return CATALOG[self.name].slot

    def text(self, **more: Any) -> str:
        own = {f.name for f in dataclasses.fields(CATALOG[self.name])}
        given = {k: v for k, v in {**self.parameters, **more}.items() if k in own}
        switch = {True: "on", False: "off"}
        words = (f"{k}={switch[v] if isinstance(v, bool) else v}" for k, v in given.items())
        return f"{self.name}:{','.join(words)}".rstrip(":")


def _spelt(text: str, options: Mapping[str, Any], note: str = "") -> _Option:
    """Return the proposal of a strategy as a recipe spells it."""
    name, _, words = text.partition(":")
    pairs = dict(pair.split("=") for pair in words.split(",") if pair)
    return _Option(name, pairs, options, note=note)


class Reader:
    """One reading.
    ``options``: of the files, with the trainer's defaults and with those replaced that mean the
    same; ``given``: without the defaults. ``sources``: default -> its value, and where the trainer
    has it. ``forced``: strategies that a row of ``read_as`` sets. ``slots``: all proposals of each
    slot. ``older``: option -> the files' options that it was read from."""

    def __init__(
        self, name: str, found: Sequence[Found], launch: launches.Launch, model: str
    ) -> None:
        self.table, self.found, self.launch = trainers.table(name), found, launch
        self.own = [one for one in found if one.kind == name]
        self.path, self.loose = self.own[0].path, self.table["loose"]
        self.made = Reading(trainer=self.table["title"])
        self.options: dict[str, Any] = {}
        self.forced: dict[Slot, _Option] = {}
        self.older: dict[str, list[str]] = {}
        self._collect()
        self.given = dict(self.options)
        self.script = next((one.script for one in self.own if one.script), "")
        self.kind = self._kind()
        self._fill()
        if not model:
            try:
                model, assumed = model_of(self.table, self.options, self.script)
            except BadInput as error:
                raise BadInput(f"{self.path}: {error}") from None
            self.made.assumed += assumed
        self.made.model = model

    @functools.cached_property
    def first(self) -> dict[str, Any]:
        """Options as the files give them, before any was replaced."""
        return {name: value for one in self.own for name, value in one.options.items()}

    def read(self) -> Reading:
        """Return the reading.

        Raises:
            BadInput: a setting without a meaning, or a recipe that is impossible.
        """
        made = self.made
        self._numbers()
        made.recipe, resolved = self._recipe()
        made.model = resolved.spec.model
        self._intended()
        made.differs += [one.note for one in self.forced.values() if one.note]
        _tell(self, resolved)
        read_sample(made, self.table["shape"], self.options, self.found)
        return made

    def _intended(self) -> None:
        """Name options of adapters that do nothing because of a default, and read the files with
        adapters."""
        key = self.table.get("kind", "")
        rows = self.table["strategies"].get("lora", ())
        named = {name for rule in rows for name in patterns(rule, self.loose)} - {key}
        own = [name for name in self.first if name in named and name.startswith(ADAPTERS)]
        if self.kind != "full" or key not in self.sources or not own:
            return
        made, default = self.made, f"{key} {self.options[key]}"
        made.idle = own
        why = f"{default} is the default, so all weights train; {key} lora is not set"
        made.unpredicted += [Uncounted(f"{name} {self.first[name]}", why, "none") for name in own]
        first, *others = self.own
        changed = dataclasses.replace(first, options={**first.options, key: "lora"})
        rest = [one for one in self.found if one not in self.own]
        with contextlib.suppress(BadInput):
            made.intended = Reader(
                first.kind, [changed, *others, *rest], self.launch, made.model
            ).read()

    def _collect(self) -> None:
        for one in self.own:
            self.made.assumed += one.remarks
            for name, value in one.options.items():
                if name in self.options and not same(self.options[name], value):
                    conflict = f"{name} is {self.options[name]}, and {one.path.name} says {value}"
                    self.made.assumed.append(f"{conflict}; the first counts")
                self.options.setdefault(name, value)
        for one in self.found:
            self.made.assumed += one.remarks if one not in self.own else []
        self.made.assumed += self.launch.assumed
        self.made.unpredicted += self.launch.unpredicted
        _, source = self.table["defaults"]["any"].get("--mixed_precision", ("", ""))
        if self.launch.precision and source.startswith("accelerate"):
            self.options.setdefault("--mixed_precision", self.launch.precision)

    def _kind(self) -> str:
        """Return whether adapters are trained: "lora" or "full"."""
        words = [w for m in self.table["models"].values() for w in m.items() if self.script]
        kinds = {kind for kind, word in words if self.script in str(word).partition(" ")[0]}
        if len(kinds & {"lora", "full"}) == 1:  # beside kinds such as alike
            return "lora" if "lora" in kinds else "full"
        if "kind" in self.table:
            return "lora" if "lora" in str(self.options.get(self.table["kind"])).lower() else "full"
        start = self.table.get("adapters", "\0")
        return "lora" if any(name.startswith(start) for name in self.options) else "full"

    def _fill(self) -> None:
        """Add the trainer's defaults, and replace options that mean the same as others."""
        self.sources: dict[str, tuple[Any, str]] = {}
        defaults = self.table["defaults"]
        for name, (value, source) in {**defaults["any"], **defaults.get(self.kind, {})}.items():
            if self.options.get(name) is None:
                copied = isinstance(value, str) and value.startswith("=")
                self.options[name] = self.options.get(value[1:]) if copied else value
                self.sources[name] = self.options[name], source
        replaced: set[str] = set()
        for row in self.table.get("read_as", ()):
            first = next(iter(row["given"]))
            if first not in replaced and row.get("with", self.kind) == self.kind:
                replaced |= {first} if self._replace(row) else set()

    def _replace(self, row: Mapping[str, Any]) -> bool:
        """Replace a row's options by those that mean the same; return whether it applies."""
        given = row["given"]
        values = agreed(given, self.options)
        if values is None or any(name in self.given for name in row.get("unless", ())):
            return False
        older = [one for one in given if one in self.first]
        self.older |= {name: older for name in row.get("is", ())}
        for name, value in row.get("is", {}).items():
            value = values[value[1:]] if str(value).startswith("$") else value
            if name in self.given and name not in given and not same(self.given[name], value):
                says = ", ".join(f"{n} {self.given[n]}" for n in given if n in self.given)
                raise BadInput(
                    f"{self.path}: {says} and {name} {self.given[name]} contradict each other; "
                    "keep one of them"
                )
            if name not in given:  # else it is the default, spelt otherwise
                self.sources.pop(name, None)
            self.options[name] = self.given[name] = value
            self.made.differs += [row["why"]] if "why" in row else []
        first = next(iter(given))
        for text in filter(None, row.get("parts", "").split("+")):
            one = _spelt(text, {first: self.options[first]}, row.get("why", ""))
            self.forced[one.slot] = one
        return True

    def _numbers(self) -> None:
        made = self.made
        for what in ("micro_batch", "accumulation"):
            for rule in self.table["settings"].get(what, ()):
                options = patterns(rule, self.loose)
                values = agreed(options, self.options)
                if options and values is not None:
                    name, count = next(iter(options)), launches.positive_int(values[what])
                    if not count:
                        said = f"{name} is {values[what]!s:.60}"
                        raise BadInput(f"{self.path}: {said}; give one whole number from 1")
                    setattr(made, what, count)
                    break
        made.processes = self.launch.processes
        known = [(rule, patterns(rule)) for rule in self.table["sharding"] if "reads" in rule]
        given = any(name not in self.sources for _, options in known for name in options)
        if not given and made.processes > 1 and any(one.launcher for one in self.own):
            return  # its launcher decides
        for rule, options in known:
            values = agreed(options, self.options)
            mesh = [launches.positive_int(values[key]) for key in MESH if key in (values or {})]
            if values is not None and min(mesh, default=2) > 1:
                listed = len(str(values.get("devices", "")).split(","))
                asked = int(values.get("processes", listed))
                made.processes = math.prod(mesh) if mesh else asked
                reads = trainers.filled(rule["reads"], values)
                self.launch.sharding = "single" if made.processes == 1 else reads
                return
        if known:
            said = ", ".join(f"{name} {self.options[name]}" for name in known[0][1])
            left = f"no row has these values, so {self.launch.sharding} is predicted"
            made.unpredicted.append(Uncounted(said, left))

    def _proposed(self) -> Iterator[_Option]:
        """Yield a strategy for each rule of the table whose options agree."""
        for name, some in self.table["strategies"].items():
            for rule in some:
                compared = patterns(rule, self.loose)
                values = agreed(compared, self.options)
                other = self.made.model not in rule.get("models", [self.made.model])
                if other or not compared or values is None:
                    continue
                given = rule.get("for", {}).items()
                fixed = {k: v[0] if isinstance(v, list) else v for k, v in given}
                factors = {**rule.get("times", {}), **rule.get("share", {})}.items()
                scaled = {k: round(float(values[k]) * n) for k, n in factors}
                parameters = {**fixed, **values, **scaled, **rule.get("reads", {})}
                yield _Option(name, parameters, compared, "lacks" in rule)

    def _recipe(self) -> tuple[str, Resolved]:
        """Return the recipe that exports to the options, and the run of it."""
        slots: dict[Slot, list[_Option]] = {}
        for one in self._proposed():
            slots.setdefault(one.slot, []).append(one)
        for slot, one in self.forced.items():
            alike = next((o for o in slots.get(slot, ()) if o.name == one.name), one)
            more, own = alike.parameters | one.parameters, {**alike.options, **one.options}
            self.forced[slot] = dataclasses.replace(one, parameters=more, options=own)
            slots[slot] = [self.forced[slot]]
        for text in self.launch.parts:  # of the launch file, where the trainer sets none
            one = _spelt(text, {})
            slots.setdefault(one.slot, [one])
        self._check(slots)
        self.slots = slots
        others = [one for slot in slots if slot not in TOGETHER for one in self._best(slots[slot])]
        return self._tried([self._expanded(slots.get(slot, [])) for slot in TOGETHER], others)

    def _check(self, slots: Mapping[Slot, Sequence[_Option]]) -> None:
        """Refuse a precision or adapters without a row: nothing else may be predicted for them."""
        if self.kind == "lora" and not slots.get(Slot.ADAPT):
            rows = self.table["strategies"].get("lora", ())
            names = sorted({name for rule in rows for name in patterns(rule, self.loose)})
            said = ", ".join(f"{name} {self.options.get(name)}" for name in names)
            raise BadInput(f"{self.path}: adapters by {said} are not known; make them plain LoRA")
        if slots.get(Slot.PRECISION):
            return
        rules = [r for n, some in self.table["strategies"].items() for r in some
                 if CATALOG[n].slot == Slot.PRECISION]  # fmt: skip
        values: dict[str, list[str]] = {}
        for rule in rules:
            for name, pattern in patterns(rule).items():
                values.setdefault(name, []).append(str(pattern))
        name = next(iter(values))
        known = ", ".join(dict.fromkeys(values[name]))
        raise BadInput(
            f"{self.path}: {name} is {self.options.get(name)}, which has no counterpart; give "
            f"one of {known}"
        )

    def _best(self, some: Sequence[_Option]) -> list[_Option]:
        """Return the proposal of a slot that explains the most options, if it is not empty."""
        best = min(some, key=lambda one: (one.lacks, -len(one.options)))
        empty = self.table.get("absent", {}).get(best.slot.name, ())
        if any(set(patterns(rule)) >= set(best.options) for rule in empty) and best.lacks:
            return []
        if best.name == "ema" and best.parameters.get("place") != "none":
            self.made.average = AVERAGE
        return [best]

    def _expanded(self, some: Sequence[_Option]) -> list[str]:
        """Return the spellings of a slot's proposals, with each choice that no option tells."""
        found: list[str] = []
        for one in some:
            own = {f.name for f in dataclasses.fields(CATALOG[one.name])} - set(one.parameters)
            free = {k: v for k, v in CHOICES.items() if k in own and one.slot not in self.forced}
            for values in itertools.product(*free.values()):
                found.append(one.text(**dict(zip(free, values, strict=True))))
        return list(dict.fromkeys(found)) or [""]

    def _tried(
        self, together: Sequence[Sequence[str]], others: list[_Option]
    ) -> tuple[str, Resolved]:
        """Return the combination whose rules differ least from the options.
        A part that the recipe refuses, or that the table lacks for this launch, is left out and
        named."""
        steps = self.made.accumulation
        more = [f"accumulate:steps={steps}"] if steps > 1 else []
        while True:
            ranked: list[tuple[tuple[int, ...], int, Resolved]] = []
            refused: Reason | None = None
            for words in itertools.product(*together):
                parts = [self.launch.sharding, *words, *(one.text() for one in others), *more]
                try:
                    resolved = resolve(_spec(self.made, "+".join(filter(None, parts))))
                    reason = resolved.refusal
                except BadInput as error:
                    reason = error.reason
                refused = refused or reason
                if reason is None:
                    ranked.append((self._score(resolved), len(ranked), resolved))
            best = min(ranked)[2] if ranked else None
            culprit, why = self._culprit(best, refused, others)
            if best and culprit is None:
                return str(best.recipe), best
            if culprit is None:
                raise BadInput(f"{self.path}: {refused}")
            others.remove(culprit)
            others += self._left_out(culprit, why)

    def _left_out(self, culprit: _Option, why: str) -> list[_Option]:
        """Name a part that is left out; return a plainer form of it that is predicted instead."""
        plainer = [one for one in self.slots.get(culprit.slot, ()) if one.name == culprit.name
                   and not one.lacks and set(one.options) < set(culprit.options)][:1]  # fmt: skip
        lost = set(culprit.options).difference(*(one.options for one in plainer))
        own = ([name] if name in self.first else self.older.get(name, ())
               for name in culprit.options if name in lost)  # fmt: skip
        named = " ".join(itertools.chain(*own))  # as the files name them, perhaps by older names
        errs = "less" if culprit.slot in SAVING and not plainer else ""
        why = f"this is left out: {why}" if errs else why
        why = f"{plainer[0].text()} is predicted: {why}" if plainer else why
        self.made.unpredicted += [Uncounted(named, why, errs)] if named else []
        return plainer

    def _culprit(
        self, best: Resolved | None, refused: Reason | None, others: Sequence[_Option]
    ) -> tuple[_Option | None, str]:
        """Return the part to leave out, and why; None if all can stay."""
        names = {one.name: one for one in others if one.slot not in self.forced}
        if best is None:
            about = (refused.about or str(refused).partition(":")[0]) if refused else ""
            # Compiled blocks go before a part that they exclude: that part decides the memory.
            graph = names.get("compile") if "compile" in str(refused) else None
            return graph or names.get(about), str(refused)
        for _, part, rule in trainers.ruled(self.table, best):
            if part and part.name in names and not patterns(rule or {}, self.loose):
                return names[part.name], (rule or {}).get("lacks", "the table has no row for it")
        return None, ""

    def _score(self, resolved: Resolved) -> tuple[int, int, int]:
        """Return how far a recipe's options are from the given ones; the smallest is the best."""
        off, lacks, notes = 0, 0, 0
        explained: set[str] = set()
        for _, part, rule in trainers.ruled(self.table, resolved):
            if part is None or part.slot not in TOGETHER or part.slot in self.forced:
                continue
            compared = patterns(rule or {}, self.loose)
            off += sum(not match(p, self.options.get(n), {}) for n, p in compared.items())
            explained |= set(compared)
            lacks += rule is None or "lacks" in rule
            notes += rule is not None and "note" in rule
        unexplained = {n for n in self._deciding if self.given.get(n)} - explained
        return off + len(unexplained), lacks, notes

    @functools.cached_property
    def _deciding(self) -> set[str]:
        """Options by which rules of ``TOGETHER`` differ, and which no forced part covers."""
        slots = set(TOGETHER) - set(self.forced)
        return {name for n, rules in self.table["strategies"].items() if CATALOG[n].slot in slots
                for rule in rules for name in patterns(rule, self.loose)}  # fmt: skip


# ---- what each option means, what is not predicted, and what is left ----


NOTED = set(trainers.DECIDING) - {Slot.OPTIMIZE}
"""Slots whose differences are told."""
WHOLE = "all weights"
"""Setting of a table that chooses between all weights and adapters."""
UNSET = ("none", "false", "no", "no_change", "disabled", "diffusers", "native", "")


def _tell(reader: Reader, resolved: Resolved) -> None:
    """Put into a ``reading.Reader`` what each option means, the defaults, and what is left."""
    made, meaning = reader.made, dict[str, list[str]]()
    for what, part, rule in trainers.ruled(reader.table, resolved):
        forced = reader.forced.get(part.slot) if part else None
        compared = forced.options if forced else patterns(rule or {}, reader.loose)
        number = getattr(made, what.replace(" ", "_"), "")
        what = "adapters" if what == WHOLE and reader.kind == "lora" else what
        for name, pattern in compared.items():
            if reader.options.get(name) and match(pattern, reader.options[name], {}):
                meaning.setdefault(name, []).append(str(part or f"{what} {number}".strip()))
        if rule and not forced and part and part.slot in NOTED:
            made.differs += [f"{part}: {rule[key]}" for key in ("note", "lacks") if key in rule]
        if rule and "lacks" in rule and what == resolved.launch.sharding:
            made.unpredicted.append(Uncounted(what, rule["lacks"]))
    made.differs = list(dict.fromkeys(made.differs))
    made.means += [("launch", text) for text in reader.launch.means]
    for name, parts in meaning.items():
        meant = "+".join(dict.fromkeys(parts))
        if name in reader.sources:
            value, source = reader.sources[name]
            made.usual.append((f"{name} {_short(value)}", meant, source))
        elif meant != "no attend":
            value = reader.first.get(name, reader.options[name])
            flag = name.startswith("-") and value is True
            made.means.append((name if flag else f"{name} {_short(value)}", meant))
    made.usual += [(name, "off", source) for name, (_, source) in reader.sources.items()
                   if reader.options[name] is False]  # fmt: skip
    for key, (errs, why, *kind) in reader.table["unpredicted"].items():
        first, *others = key.split("&")
        names = [_holds(reader, first), *(_holds(reader, one, usual=True) for one in others)]
        if not all(names):
            continue
        stays = resident_models.part_of(made.model, kind[0]) if kind else []
        if stays:
            made.also += stays
            works = kind[1:] != ["idle"] and ":" not in kind[0]
            made.encoding += [kind[0]] if works else []
            meant = "on each GPU too" + ", encoding in each step" * works
            made.means.append((", ".join(names), f"{meant}: {', '.join(stays)}"))
        else:
            made.unpredicted.append(Uncounted(", ".join(names), why, errs))
    _rest(reader, set(meaning))


def _holds(reader: Reader, condition: str, *, usual: bool = False) -> str:
    """Return the option of a condition that holds, as it is given; empty if it does not.
    ``usual``: the model's name and the trainer's defaults count too. ``a|b``: either value."""
    if condition.startswith("!"):
        found = reader.options if usual else reader.given
        there = (n for n, v in found.items() if v and fnmatchcase(n, condition[1:]))
        return "" if any(there) else f"no {condition[1:].strip('*.')}"
    name, unequal, value = re.fullmatch(r"([^=!]+)(!?)=?(.*)", condition).groups()
    defaults = {key: reader.options[key] for key in reader.sources} if usual else {}
    defaults |= {"model": reader.made.model} if usual else {}
    for key, given in {**defaults, **reader.first}.items():
        there = fnmatchcase(key, name) and str(given).lower() not in UNSET
        equal = any(same(one, given) for one in value.split("|"))
        if there and (not value or equal != bool(unequal)):
            alone = given is True or name.endswith("*")
            return name.rstrip("*") if alone else f"{key} {_short(given)}"
    return ""


def _rest(reader: Reader, read: set[str]) -> None:
    """Name options that no row reads, and values that no rule of a known option has."""
    fixed, names = _known(reader.table, reader.loose)
    listed = [key for key in reader.table["unpredicted"] if "=" not in key]
    meant = {name for name in reader.first if reader.given.get(name) != reader.first[name]}
    left = {one.what.split(" ")[0].rstrip(":,") for one in reader.made.unpredicted}
    known = read | names | meant | left
    declared = trainers.options(reader.table["name"])
    blocks = {name.rpartition(".")[0] for name in declared} - {""}
    for name, value in reader.first.items():
        noted = any(fnmatchcase(name, key) for key in listed)
        if noted or name in known or re.search(r"\.\d+\.resolution$", name):
            continue
        if name.rpartition(".")[0] in blocks and name not in {*declared, *fixed}:
            why = f"{reader.made.trainer} has no such option"
            reader.made.unpredicted.append(Uncounted(f"{name} {_short(value)}", why, "none"))
        elif name not in fixed:
            reader.made.unread.append(name)
        elif str(value).lower() not in UNSET:
            why = "no row has this value, so what is usual here is predicted"
            reader.made.unpredicted.append(Uncounted(f"{name} {_short(value)}", why))


def _known(table: Mapping[str, Any], loose: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the options of which rules compare fixed values, and the others that are read."""
    blocks = (*table["strategies"].values(), *table["settings"].values(), table["sharding"])
    rules = [rule for block in blocks for rule in block]
    every = {name for rule in rules for name in flat(rule.get("options", {}))}
    fixed = {n for rule in rules for n, p in patterns(rule, loose).items() if "$" not in str(p)}
    fixed -= {n for rule in rules for n in {*flat(rule.get("options", {}))} - {*patterns(rule)}}
    names = {*PATHS, *LINKS, *COUNTS, *sample_options(table["shape"]), *(every - fixed)}
    names |= {"model_flavour", "--network_module", *table.get("model", {})}
    names |= {w for m in table["models"].values() for v in m.values() for w in str(v).split()}
    same = {name for row in table.get("read_as", ()) for name in row["given"]}
    return fixed, names | (same - fixed)


def _short(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
