"""Sorting of a configuration's options into those read, not predicted and not read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from harness.planner import resident_models
from harness.planner.export import trainers
from harness.planner.export.files import LINKS, flat
from harness.planner.export.launches import COUNTS
from harness.planner.export.matching import match, patterns, same
from harness.planner.export.models import PATHS, sample_options
from harness.planner.verdict import Uncounted
from strategies.base import Slot

if TYPE_CHECKING:
    from harness.resolve import Resolved

NOTED = set(trainers.DECIDING) - {Slot.OPTIMIZE}
"""Slots whose differences are told."""
WHOLE = "all weights"
"""Setting of a table that chooses between all weights and adapters."""
OFF = ("none", "false", "no", "no_change", "disabled", "diffusers", "native", "")


def tell(reader: Any, resolved: Resolved) -> None:
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
        value = reader.first.get(name, reader.usual.get(name, reader.options[name]))
        told = "+".join(dict.fromkeys(parts))
        if name in reader.sources:
            made.usual.append((f"{name} {_short(value)}", told, reader.sources[name]))
        elif told != "no attend":
            flag = name.startswith("-") and value is True
            made.means.append((name if flag else f"{name} {_short(value)}", told))
    off = (name for name in reader.sources if reader.options[name] is False)
    made.usual += [(name, "off", reader.sources[name]) for name in off]
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
            told = "on each GPU too" + ", encoding in each step" * works
            made.means.append((", ".join(names), f"{told}: {', '.join(stays)}"))
        else:
            made.unpredicted.append(Uncounted(", ".join(names), why, errs))
    _rest(reader, set(meaning))


def _holds(reader: Any, condition: str, *, usual: bool = False) -> str:
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
        there = fnmatchcase(key, name) and str(given).lower() not in OFF
        equal = any(same(one, given) for one in value.split("|"))
        if there and (not value or equal != bool(unequal)):
            whole = given is True or name.endswith("*")
            return name.rstrip("*") if whole else f"{key} {_short(given)}"
    return ""


def _rest(reader: Any, read: set[str]) -> None:
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
        elif str(value).lower() not in OFF:
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
