"""Conflicts between strategies: the table ``conflicts.yaml``, and the one function that reads it.

A strategy is refused beside a trait of the launch, never beside a name. What a strategy alone can
say (of its parameters, or of the model) is in its own ``refuses``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

from strategies.base import Slot
from strategies.engine import RunContext
from strategies.files import own_table

FILE = own_table(Path(__file__).with_name("conflicts.yaml"))
TRAITS: dict[str, str] = FILE.pop("traits")
"""Trait -> meaning. A strategy that cannot work with another refuses its trait, never its name."""
SLOTS: dict[str, dict[str, str]] = FILE.pop("slots")
"""Workload -> name of a slot -> why what fills it makes no sense there, with the remedy."""
OF_LAUNCH = ("cpu", "cuda", "accumulates", "clips")
"""Words of the table that are no trait of a part."""


class Entry(NamedTuple):
    """An entry for one strategy; see the head of the table.

    ``parameter``: the one that the entry is about ("": any); ``value``: its text (None: any but the
    default). ``any``: the launch has one of these traits (empty: of no matter), ``every``: all of
    these, ``unless``: none of these.
    """

    parameter: str
    value: str | None
    any: frozenset[str]
    every: frozenset[str]
    unless: frozenset[str]
    why: str

    def met(self, part: Any, traits: frozenset[str]) -> bool:
        """Return whether ``part``, a strategy, is refused beside these traits of a launch."""
        if self.parameter:
            given = getattr(part, self.parameter)
            usual = type(part).__dataclass_fields__[self.parameter].default
            if given == usual if self.value is None else str(given) != self.value:
                return False
        some = not self.any or bool(self.any & traits)
        return some and self.every <= traits and not self.unless & traits


@functools.cache
def table() -> dict[str, list[Entry]]:
    """Return strategy -> its entries, in the order of the file."""
    found: dict[str, list[Entry]] = {}
    for keys, entries in FILE.items():
        for key in keys.split(", "):
            name, _, condition = key.partition(":")
            parameter, equals, value = condition.partition("=")
            for entry in entries:
                words = [entry.get(key, ()) for key in ("with", "with_all", "unless")]
                some, every, none = (frozenset([w] if isinstance(w, str) else w) for w in words)
                text = value if equals else None
                one = Entry(parameter, text, some, every, none, entry["why"])
                found.setdefault(name, []).append(one)
    return found


def refusal(part: Any, launch: RunContext) -> str | None:
    """Return why ``part`` cannot run under ``launch`` by the table, with the remedy; or None."""
    more = {launch.device, *(["accumulates"] * (launch.accumulation > 1))}
    traits = launch.traits | more | ({"clips"} if launch.clips else set())
    for one in table().get(part.name, ()):
        if one.met(part, traits):
            met = min(one.any & traits, default="")
            words: dict[str, Any] = {"sharding": launch.sharding, "trait": TRAITS.get(met, met)}
            return one.why.format(**vars(part), **words)
    return None


def out_of_place(slot: Slot, workload: str) -> str:
    """Return why a strategy in ``slot`` makes no sense in ``workload``, with the remedy."""
    usual = f"it has no effect in the workload {workload}; leave it out"
    return SLOTS[workload].get(slot.name, usual)
