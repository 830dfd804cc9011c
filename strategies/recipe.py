"""Recipes: text such as ``zero3+bf16+checkpoint:every=2``, parsed into strategies in slot order.

Each strategy fills one slot, and slots have an order. The order of the names in the text does not
matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from strategies.base import BadInput, Conflict, Reason, Slot, parity
from strategies.engine import RunContext
from strategies.strategy import Strategy
from strategies.subject import Subject
from strategies.words import PARAMETERS, PLAIN, SPELLED, TABLE, hint, name_of, nearest, plain
from strategies.workloads import SAMPLE, TRAIN

# ---- unsupported techniques ----

ABSENT: dict[str, str] = TABLE["strategies"]
"""Strategy -> why it is not supported, then "; " and the alternative."""
ENDED: dict[str, str] = TABLE["others"]
"""Parameter, command, option or page that has ended -> why, then "; " and the alternative."""


def absent(name: str) -> str | None:
    """Return why there is no strategy of this name, in any spelling; None if the name is
    unknown."""
    small = plain(name)
    return ABSENT.get(SPELLED.get(small, small))


class RecipeError(BadInput):
    """Text that is not a recipe: an unknown name or parameter, or a value out of range."""


@dataclass(frozen=True)
class Recipe:
    """Strategies in slot order, every mandatory slot filled; ``text`` is the canonical name."""

    strategies: tuple[Strategy, ...]
    text: str

    def in_slot(self, slot: Slot) -> Strategy | None:
        """Return the strategy that fills ``slot``, or None."""
        return next((s for s in self.strategies if s.slot == slot), None)

    @property
    def sharding(self) -> Any:
        """Sharding strategy, which names the launch file; every recipe has one."""
        return self.in_slot(Slot.SHARD)

    def alone(self, device: str) -> bool:
        """Return whether its launch file starts one process, whatever number is requested."""
        return "one_process" in self.sharding.engine(device).traits

    @property
    def parity(self) -> str:
        """Parity of the whole recipe: exact only if every part is."""
        return parity(self.altering)

    @property
    def altering(self) -> tuple[Strategy, ...]:
        """Parts that change the computation by design."""
        return tuple(s for s in self.strategies if s.alters)

    @property
    def accumulation(self) -> int:
        """Micro-batches of an optimizer step on every process: accumulated, or the engine's own."""
        part: Any = self.in_slot(Slot.ACCUMULATE)
        return self.sharding.micro_batches * (part.steps if part else 1)

    def shares(self, device: str, ranks: int) -> int:
        """Return the number of shares of a global batch on ``ranks`` ranks, at least 1."""
        engine = self.sharding.engine(device).chosen(self.sharding.choices)
        layout = engine.layout(ranks).divided(self.sequence, self.tensor)
        return max(1, layout.data)

    @property
    def sequence(self) -> int:
        """Number of ranks that split the tokens of the same samples."""
        return getattr(self.in_slot(Slot.SEQUENCE), "ranks", 1)

    @property
    def tensor(self) -> int:
        """Number of ranks that split the same weights."""
        part: Any = self.in_slot(Slot.TENSOR)
        return part.ranks if part else 1

    @property
    def together(self) -> int:
        """Number of ranks that work on the same samples."""
        return self.sequence * self.tensor

    def launch(
        self,
        device: str,
        processes: int,
        subject: Subject,
        *,
        clips: bool = False,
        simulated: bool = False,
        workload: str = TRAIN,
    ) -> RunContext:
        """Return the run context: the launch file's facts and the traits of all parts."""
        engine = self.sharding.engine(device).chosen(self.sharding.choices)
        of_parts = [part.traits() for part in self.strategies]
        return RunContext(
            sharding=self.sharding.name,
            engine=engine,
            subject=subject,
            device=device,
            processes=processes,
            accumulation=self.accumulation,
            sequence=self.sequence,
            tensor=self.tensor,
            clips=clips,
            simulated=simulated,
            traits=engine.traits.union(*of_parts, {"sampling"} if workload == SAMPLE else ()),
            workload=workload,
        )

    def refusal(self, launch: RunContext) -> Reason | None:
        """Return the first reason why a part refuses ``launch``, prefixed by the part's name; else
        None."""
        for part in self.strategies:
            reason = part.out_of_place(launch) or part.refuses(launch)
            if reason:
                return Reason.read(f"{part.name}: {reason}", part.name)
        return None

    def accelerator_kwargs(self, launch: RunContext) -> dict[str, Any]:
        """Return all parts' keyword arguments for ``Accelerator``, with handlers concatenated.

        Raises:
            Conflict: two parts set the same argument.
        """
        merged: dict[str, Any] = {}
        for part in self.strategies:
            for key, value in part.accelerator_kwargs(launch).items():
                if key == "kwargs_handlers":
                    merged.setdefault(key, []).extend(value)
                elif key in merged:
                    raise Conflict(f"{part.name} sets Accelerator({key}=...), already set")
                else:
                    merged[key] = value
        return merged

    def __str__(self) -> str:
        return self.text


def parse(text: str, catalog: Mapping[str, type[Strategy]], defaults: Iterable[Strategy]) -> Recipe:
    """Return the recipe that ``text`` names; ``defaults`` fill mandatory slots that it leaves open.

    The canonical text is in slot order and leaves out parts that equal a default.

    Raises:
        RecipeError: an unknown strategy or parameter, or a bad value.
        Conflict: two strategies for one slot, or no sharding strategy.
    """
    filled: dict[Slot, Strategy] = {}
    for word in text.replace(" ", "").split("+"):
        part = _parse_part(word, catalog)
        if (other := filled.setdefault(part.slot, part)) is not part:
            names = f"{other.name} and {part.name}"
            raise Conflict(
                f"recipe {text!r}: {names} both fill the place {part.slot.name}; keep one of them"
            )
    if Slot.SHARD not in filled:
        raise Conflict(f"recipe {text!r} names no sharding; begin with one, as in 'ddp+{text}'")
    usual = {part.slot: part for part in defaults}
    named = [str(filled[slot]) for slot in sorted(filled) if filled[slot] != usual.get(slot)]
    parts = usual | filled  # a named part replaces the default
    return Recipe(tuple(parts[slot] for slot in sorted(parts)), "+".join(named))


def _parse_part(word: str, catalog: Mapping[str, Any]) -> Strategy:
    name, arguments = name_of(word, catalog), word.partition(":")[2]
    if name not in catalog and absent(name):
        raise RecipeError(f"there is no {name}: {absent(name)}")
    if name not in catalog:
        raise RecipeError(f"unknown strategy {name!r}; {hint(word, catalog)}")
    kind = catalog[name]
    types = {f.name: f for f in fields(kind)}
    given: dict[str, Any] = {}
    for pair in filter(None, arguments.split(",")):
        key, equals, value = pair.partition("=")
        key = PARAMETERS.get(key, key) if PARAMETERS.get(key) in types else key
        if key not in types:
            fix = nearest(key, types) if types else "it has none"
            if key.isdigit() and name in PLAIN:
                fix = f"write {name}:{PLAIN[name]}={key}"
            fix = ENDED.get(f"{name}:{key}") or fix
            raise RecipeError(f"{name} has no parameter {key!r}; {fix}")
        default = types[key].default
        if not equals:
            raise RecipeError(f"{name}:{key} needs a value, as in {name}:{key}={default}")
        given[key] = _value(name, key, value, default)
    try:
        return kind(**given)
    except ValueError as error:
        raise RecipeError(f"{name}: {error}") from None


def _value(name: str, key: str, text: str, default: Any) -> Any:
    """Return ``text`` as the type of the field's default; no number for an integer stays text."""
    if isinstance(default, bool):
        words = {"on": True, "true": True, "off": False, "false": False}
        if text.lower() not in words:
            raise RecipeError(f"{name}:{key} is on or off, not {text!r}")
        return words[text.lower()]
    if isinstance(default, float):
        try:
            return float(text)
        except ValueError:
            raise RecipeError(f"{name}:{key} is a number, not {text!r}") from None
    if isinstance(default, int):
        return int(text) if text.lstrip("-").isdigit() else text
    return text
