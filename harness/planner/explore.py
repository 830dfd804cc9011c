"""The answer of a plan: what to predict of a lattice next, and the one rule that takes the answer.
A lattice is nearly a product: what a level (checkpoints, streamed blocks) does to memory and time
hardly depends on the column (sharding, precision, optimizer or adapter). So most recipes are
estimated from predicted ones, and only those are predicted that may be the answer. No torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from harness.planner import uncertainty, verdict
from harness.planner.edits import OFFLOADED, adapts
from harness.planner.overhead import fixed_overhead
from harness.planner.speed.rates import rates
from harness.planner.speed.roofline import BUSY, KERNELS, seconds
from harness.planner.verdict import Fit
from harness.resolve import Resolved
from harness.system.cards import Card
from strategies.base import Slot
from strategies.streaming.block_swap import AT_ONCE, spread
from strategies.subject import Subject

# ---- a recipe of a lattice ----


FLOAT, HALF = 4, 2
"""Bytes of an element."""


class Point:
    """A recipe of the lattice: its coordinates, and bytes that follow from them.
    ``share``: the share of the blocks that it recomputes. ``products``: it keeps their matrix
    products. ``part``: the layers of each block that it recomputes, or "block". ``moved``: what
    blocks keep waits in host memory. ``swapped``: the number of streamed blocks. ``column``: its
    other parts."""

    def __init__(self, row: Resolved) -> None:
        slots = (Slot.RECOMPUTE, Slot.OFFLOAD, Slot.SWAP)
        recompute, moved, swap = apart = [row.recipe.in_slot(slot) for slot in slots]
        self.row, self.label, self.traits = row, str(row.recipe), row.launch.traits
        self.share = recompute.share if recompute else 0.0
        self.products = recompute is not None and recompute.keep == "products"
        self.part = recompute.part if recompute else "block"
        self.moved = moved is not None
        self.swapped = swap.blocks if swap else 0
        parts = [part for part in row.recipe.strategies if part not in apart]
        self.column = tuple(map(str, parts))
        self.sharding = self.column[0]
        self.adapted = adapts(row)
        self.elements, self.ranks = row.subject.parameters, row.launch.processes
        self.shards = "shards" in self.traits
        self.splits = "split_parameters" in self.traits
        self.pure = bool(self.traits & {"pure_bf16", "float_master"})
        """True if weights are stored in 16 bits."""
        self.quantized = "quantized_weights" in self.traits
        """True if frozen weights are stored in fewer bits than they compute in."""
        self.fused = not self.adapted and "frees_gradients" in self.traits
        """True if streamed weights train on the device, and return to host memory."""
        hosting = bool(self.traits & {"host_optimizer", "host_weights"})
        self.hosts_optimizer = hosting and not self.adapted
        """True if the optimizer of all weights works on the host."""
        self.hosts_weights = row.launch.engine.place("parameters") != "device"
        """True if a rank's weights wait in host memory."""
        hosts = self.hosts_weights or self.hosts_optimizer
        self.waits = bool(self.swapped) or self.moved or hosts
        """True if weights, optimizer state or activations wait in host memory."""
        self.name = "+".join(self.column)
        """Its column, as words of its recipe; ``level``: its other words."""
        self.level = "+".join(w for w in self.label.split("+") if w not in self.column)

    @property
    def kept(self) -> float:
        """An estimate of the share of a block's activations that the device keeps."""
        if self.moved:
            return 0.0
        return 0.5 if self.products or self.part != "block" else 1 - 0.95 * self.share

    @property
    def again(self) -> float:
        """An estimate of the share of the forward pass that backward repeats."""
        if self.part != "block":
            return 0.4
        return 0.2 if self.products else self.share

    def apart(self, other: Point) -> tuple[bool, float, int]:
        """Return how unlike two points are: their columns, what they keep and repeat, and what they
        stream."""
        level = abs(self.kept - other.kept) + abs(self.again - other.again)
        return self.name != other.name, level, abs(self.swapped - other.swapped)

    @functools.cached_property
    def rounded(self) -> list[str]:
        """Return a word for each rounding: frozen weights in 8 bits have one, those in 4 bits two.
        Trained weights have one for rounded moments, and one for 16 bits without a master."""
        if self.adapted:
            bits = {HALF / 4: ["4-bit weights"] * 2, HALF / 2: ["8-bit weights"]}
            return bits.get(self.weight_bytes, [])
        found = {"rounds_state": "rounded moments", "pure_bf16": "16-bit weights"}
        return [words for trait, words in found.items() if trait in self.traits]

    @property
    def rounding(self) -> int:
        """Number of its roundings."""
        return len(self.rounded)

    @functools.cached_property
    def streamed(self) -> int:
        """The most elements that wait in host memory: those of the streamed blocks but two."""
        return sum(sorted(self._swapped_sizes)[AT_ONCE:])

    @functools.cached_property
    def stepped_away(self) -> int:
        """Elements that the host's optimizer steps: those of all streamed blocks, if they train and
        are not stepped on the device."""
        return 0 if self.adapted or self.fused else sum(self._swapped_sizes)

    @property
    def _swapped_sizes(self) -> list[int]:
        sizes = _block_sizes(self.row.subject)
        return [sizes[i] for i in spread(self.swapped, len(sizes))] if self.swapped else []

    @functools.cached_property
    def weight_bytes(self) -> float:
        """The fewest bytes in which an element of the model's weights is stored."""
        if "packed_weights" in self.traits:
            return HALF / 4
        if self.quantized:
            return HALF / 2
        return HALF if self.pure else FLOAT

    @functools.cached_property
    def optimizer_bytes(self) -> float:
        """The fewest bytes of optimizer state for each element of the model's weights."""
        if self.adapted:
            return 0.0
        master = FLOAT if "float_master" in self.traits else 0
        each = HALF if "pure_bf16" in self.traits else FLOAT
        return master + (0.0 if "own_state" in self.traits else 2.0 * each)

    @functools.cached_property
    def state_bytes(self) -> float:
        """The fewest bytes of weights and optimizer state that a rank keeps on its device."""
        here, stepped = self.elements - self.streamed, self.elements - self.stepped_away
        weights = self.weight_bytes * here / (self.ranks if self.splits else 1)
        optimizer = self.optimizer_bytes * stepped / (self.ranks if self.shards else 1)
        hosted = self.traits & {"host_weights", "host_optimizer"}
        return (0.0 if self.hosts_weights else weights) + (0.0 if hosted else optimizer)

    @functools.cached_property
    def gradient_bytes(self) -> float:
        """The fewest bytes of gradients that a rank holds beside its state when it steps."""
        early = {"frees_gradients", "early_gradients", "host_weights", "host_optimizer"}
        if self.adapted or self.traits & early:
            return 0.0
        each = HALF if self.shards else self.weight_bytes
        return each * (self.elements - self.stepped_away) / (self.ranks if self.shards else 1)

    @property
    def hosted_bytes(self) -> float:
        """The fewest bytes that streaming an element of the weights keeps on the host."""
        weights = self.weight_bytes
        return weights if self.adapted or self.fused else 2 * weights + self.optimizer_bytes


@functools.cache
def _block_sizes(subject: Subject) -> tuple[int, ...]:
    return tuple(subject.block_parameters)


# ---- usual recipes ----


RARE = (
    "checkpoint:share", "checkpoint:part", "checkpoint:keep", "offload_activations", "adam4bit",
    "fsdp2_offload",
)  # fmt: skip
"""Beginnings of parts that hardly any trainer has."""


def usual(row: Resolved) -> bool:
    """Return True if trainers have all parts of a recipe."""
    words = str(row.recipe).split("+")
    if any(word.startswith(RARE) for word in words):
        return False
    alone = row.launch.processes == 1 and adapts(row)
    return not (alone and words[0].endswith(OFFLOADED))


# ---- the rule of the answer ----


EVEN = 0.1
"""Relative difference of two times up to which less memory is worth more."""
SAME = 0.01
"""Relative difference of two needs up to which fewer parts are worth more."""
BETTER = 0.05
"""Relative difference of two needs, or times, from which a row dominates one that it equals in all
else. Smaller differences are those of allocator blocks."""
RULE = (
    "The answer: sure to fit; of the usual recipes within the range of time of the fastest, the "
    "most exact weights and moments, and nothing in host memory; of these, up to 10 % slower than "
    "the fastest, the least memory, then the fewest parts. A row that is as exact, needs no more "
    "and takes no longer, and is 5 % better in one, is the answer in its place."
)


class Option(NamedTuple):
    """A recipe with its need and time, predicted (``fit``) or estimated.
    ``sure``: it fits by the upper end of its range; ``may``: by the lower end. ``share``: half of
    the uncertainty of ``seconds``, relative."""

    point: Point
    need: float
    seconds: float
    share: float
    sure: bool
    may: bool
    fit: Fit | None = None

    @property
    def order(self) -> tuple[float, int, float]:
        """Sort key of recipes that are as exact and about as fast; needs differ by ``SAME``."""
        return self.need, len(self.point.row.recipe.strategies), self.seconds


def option_of(fit: Fit) -> Option:
    """Return a predicted recipe as an option."""
    total = fit.seconds.total
    given = Point(fit.resolved), float(fit.need_bytes), total, fit.seconds.spread / total / 2
    return Option(*given, sure=fit.fits, may=fit.may_fit, fit=fit)


def best_of(options: Sequence[Option]) -> Option | None:
    """Return the answer among recipes that train the same weights, by ``RULE``; None if none may
    fit. If none is sure to fit, those count that may."""
    able = able_of(options)
    if not able:
        return None
    quick = min(able, key=lambda one: one.seconds)
    near = [one for one in able if within(one, quick)]
    near = [one for one in near if usual(one.point.row)] or near
    exact = min((one.point.rounding, one.point.waits) for one in near)
    some = [one for one in near if (one.point.rounding, one.point.waits) == exact]
    least = (1 + EVEN) * min(one.seconds for one in some)
    some = [one for one in some if one.seconds <= least]
    small = (1 + SAME) * min(one.need for one in some)
    found = min((one for one in some if one.need <= small), key=lambda one: one.order[1:])
    while better := [one for one in able if dominates(one, found)]:
        found = min(better, key=lambda one: one.order)
    return found


def able_of(options: Sequence[Option]) -> list[Option]:
    """Return those that are sure to fit; if none is, those that may."""
    return [one for one in options if one.sure] or [one for one in options if one.may]


def within(slow: Option, quick: Option) -> bool:
    """Return True if ``slow`` may take as little as ``quick``, with half of the uncertainty of
    ``quick`` in favour of each."""
    return slow.seconds * (1 - quick.share) <= quick.seconds * (1 + quick.share)


def dominates(one: Option, other: Option) -> bool:
    """Return True if ``one`` is as exact, needs no more and takes no longer, and less of one."""
    less = one.need < (1 - BETTER) * other.need or one.seconds < (1 - BETTER) * other.seconds
    no_more = one.need <= other.need and one.seconds <= other.seconds
    return less and no_more and one.point.rounding <= other.point.rounding


def reason(fit: Fit, answer: Fit) -> str:
    """Return why a row that is faster or smaller than the answer is not it; empty for any other."""
    if fit is answer or not fit.seconds or fit.need_bytes is None or not fit.may_fit:
        return ""
    one, best = option_of(fit), option_of(answer)
    if one.need >= best.need and one.seconds >= best.seconds:
        return ""
    if best.sure and not one.sure:
        return "may not fit"
    if one.point.rounding > best.point.rounding:
        return one.point.rounded[0]
    if one.point.waits > best.point.waits:
        return "host memory"
    if not usual(fit.resolved):
        return "rare"
    return "slower" if one.seconds > best.seconds else "larger"


# ---- estimates ----


LEVEL, COLUMN, APART = 0.03, 0.1, 0.2
"""How far an estimate may be off: from three corners of a rectangle of the lattice, from another
level of the column, and from another column. ``tests/predict/test_explore.py`` holds answers to
whole lattices."""


def copied(one: Point, gpu: Card) -> float:
    """Return seconds in which streamed weights are copied for forward and backward: computation can
    hide them."""
    waits = (2 + one.fused) * one.streamed
    waits += one.elements / one.ranks if one.hosts_weights else 0
    return one.weight_bytes * waits / rates(gpu, one.ranks).to_host


def hosted(one: Point, gpu: Card) -> float:
    """Return seconds of an optimizer on the host, which nothing hides: it reads and writes its
    state, and of streamed blocks also the weights."""
    if not one.hosts_optimizer and (one.adapted or not one.swapped):
        return 0.0
    each = 2 * one.optimizer_bytes + (3 * one.weight_bytes if one.swapped else 0.0)
    elements = one.elements / one.ranks if one.hosts_optimizer else one.stepped_away
    return each * elements / rates(gpu, one.ranks).host


def fixed(one: Point, gpu: Card) -> int:
    """Return the bytes beside tensors, and of the models that stay on the GPU."""
    sharding = one.row.recipe.sharding.alike()
    return fixed_overhead(gpu, one.row.spec.processes, sharding).total + gpu.beside


def host_bytes(one: Point, gpu: Card) -> float:
    """Return the fewest bytes that the ranks of one node keep in host memory."""
    waits, each = one.streamed, one.hosted_bytes
    if one.hosts_optimizer:
        waits, each = one.elements, one.optimizer_bytes
    here = min(gpu.node, one.row.spec.processes)
    return each * waits * here / (one.ranks if one.shards else 1)


class Estimates:
    """Needs and times of all recipes of one training, from those that are predicted.
    ``at``: these by level and column. ``forwards``: recipe -> seconds of its forward kernels."""

    def __init__(self, gpu: Card) -> None:
        self.gpu, self.at = gpu, dict[tuple[str, str], Option]()
        self.forwards = dict[str, float]()

    @property
    def known(self) -> list[Option]:
        return list(self.at.values())

    def add(self, fit: Fit) -> None:
        """Add a prediction that has a need and a time."""
        option = option_of(fit)
        work = [w for w in fit.prediction.work if w.phase == BUSY[0] and w.kind in KERNELS]
        forward = seconds(work, fit.gpu, fit.resolved.spec.processes, fit.label).total
        self.at[option.point.level, option.point.name] = option
        self.forwards[option.point.label] = forward

    def option(self, one: Point, favour: bool) -> Option:
        """Return an estimate; in ``favour`` it is off in favour of the recipe, as far as may be."""
        # What is copied or gathered beside computation may be hidden or not.
        beside, off = one.waits or one.splits, APART
        if corner := self._corner(one):
            need, took = corner
            off = COLUMN if beside else LEVEL
        elif self.at:
            near = min(self.known, key=lambda known: known.point.apart(one))
            need, took = self._need(one, near), self._seconds(one, near)
            if near.point.name == one.name and not beside:
                off = COLUMN
        else:
            need, took = one.state_bytes + one.gradient_bytes, hosted(one, self.gpu)
        if favour:
            need, took = (1 - off) * need, (1 - off) * took
        need = max(need, fixed(one, self.gpu) + one.state_bytes)
        low, high = (1 - share_of(one)) * need, (1 + share_of(one)) * need
        host, have = host_bytes(one, self.gpu), self.gpu.host_bytes(one.row.spec.processes)
        ample = 1.0 if favour else 1 + share_of(one)
        sure = high <= self.gpu.memory_bytes and ample * host <= have
        share = min((known.share for known in self.known), default=0.15)
        return Option(one, need, took, share, sure, sure or low <= self.gpu.memory_bytes)

    def _corner(self, one: Point) -> tuple[float, float] | None:
        """Return need and seconds by the recipe's level in another column, its column in another
        level, and the recipe that completes the rectangle; None if no such three are predicted."""
        for (level, name), own in self.at.items():
            for (other, column), beside in self.at.items() if name == one.name else ():
                base = self.at.get((level, column))
                # A streamed block saves its weights' bytes, which differ between columns.
                unlike = beside.point.weight_bytes != one.weight_bytes
                if unlike and own.point.swapped != one.swapped:
                    continue
                if other == one.level and column != one.name and base:
                    took = beside.seconds + own.seconds - base.seconds
                    return max(beside.need + own.need - base.need, 0.0), max(took, 0.0)
        return None

    def _need(self, one: Point, near: Option) -> float:
        """Return the need of another level of the column, with what ``one`` keeps; else its own
        state and activations."""
        most = max(self.known, key=lambda known: known.point.kept)
        beyond = max((most.fit.prediction.beyond.get(phase, 0) for phase in BUSY), default=0)
        each = beyond / max(most.point.kept, 0.1)

        def held(point: Point) -> float:
            return point.state_bytes + max(point.gradient_bytes, each * point.kept)

        if near.point.name != one.name:
            return fixed(one, self.gpu) + held(one)
        return near.need + held(one) - held(near.point)

    def _seconds(self, one: Point, near: Option) -> float:
        found, forward = near.fit.seconds, self.forwards[near.point.label]
        busy = found.compute + found.overhead + (one.again - near.point.again) * forward
        if one.sharding == near.point.sharding:
            busy += found.communication
        return max(busy, copied(one, self.gpu)) + hosted(one, self.gpu)


def share_of(one: Point) -> float:
    """Return the smallest uncertainty that the memory of a recipe can have."""
    shares, traits = uncertainty.shares(), one.traits
    own = "offloaded" if traits & uncertainty.HOSTED else "sharded" if one.shards else "one GPU"
    return min(shares[kind].share for kind in {own, "set-up", "beside the step"})


# ---- search ----


UNTIMED = 6
"""Recipes without a prediction after which a search stops."""
ENOUGH = 4
"""Recorded predictions of a training from which its answer is taken without another."""
SMALLEST = 3
"""Most recipes that are predicted to find the one that needs the least, if none fits."""


def headed(fits: Sequence[Fit], best: Fit | None) -> dict[str, Fit]:
    """Return the fastest, the most exact and the smallest of ``fits``, where they are not ``best``
    and better by more than ``SAME``."""
    timed = [fit for fit in fits if fit.need_bytes is not None and fit.seconds]
    able = able_of([option_of(fit) for fit in timed])
    if best is None or not able:
        return {}
    own = option_of(best)
    exact = min(one.point.rounding for one in able)
    quick = min(able, key=lambda one: one.seconds)
    small = min(able, key=lambda one: one.need)
    found = {"fastest": quick} if quick.seconds < (1 - SAME) * own.seconds else {}
    if exact < own.point.rounding:
        some = [one for one in able if one.point.rounding == exact]
        found["exact"] = min(some, key=lambda one: one.seconds)
    if small.need < (1 - SAME) * own.need:
        found["least memory"] = small
    return {head: one.fit for head, one in found.items()}


class Search:
    """Search among ``rows`` that train the same weights for the answer on ``gpu``.
    Roots are predicted first: a column with all activations kept, and with few. Then the recipe
    that by an estimate in its favour would change the answer, the best of them first, until none is
    left. ``fits``: the predictions. ``unable``: the number of recipes that the card cannot run.
    ``recorded``: only predictions that ship with the project were compared. ``stopped``: by Ctrl-C,
    before the answer was sure."""

    def __init__(self, rows: Sequence[Resolved], gpu: Card) -> None:
        self.gpu, self.fits, self.small = gpu, list[Fit](), 0
        self.left = [Point(row) for row in rows if not verdict.lack_of(row, gpu)]
        self.recipes, self.unable = len(rows), len(rows) - len(self.left)
        self.adapters = adapts(rows[0])
        self.estimates, self.recorded, self.stopped = Estimates(gpu), False, False

    @property
    def best(self) -> Fit | None:
        """The answer."""
        found = best_of(self.estimates.known)
        return found.fit if found else None

    @property
    def nearest(self) -> Fit | None:
        """The predicted one with the smallest shortage, if none fits."""
        return None if self.best else verdict.nearest(self.fits)

    @property
    def others(self) -> dict[str, Fit]:
        """Head -> the fastest, the most exact and the smallest, where they are not the answer."""
        return headed(self.fits, self.best)

    @property
    def failed(self) -> int:
        """Number of recipes whose prediction failed."""
        return sum(fit.need_bytes is None for fit in self.fits)

    @property
    def as_json(self) -> dict[str, Any]:
        """The search as plain data."""
        best, names = self.best, ("recipes", "failed", "unable", "recorded", "stopped")
        found = {"training": "adapters" if self.adapters else "all weights"}
        found |= {name: getattr(self, name) for name in names}
        found |= {"predicted": len(self.fits) - self.failed, "sure": bool(best and best.fits)}
        found |= {head: fit.label for head, fit in self.others.items()}
        return found | {"answer": best.label if best else None}

    def wanted(self) -> list[Resolved]:
        """Return the rows to predict next; none if the answer is known."""
        if self.recorded or (len(self.fits) >= UNTIMED and not self.estimates.known):
            return []
        if not self.estimates.known:
            return [one.row for one in self._roots()]
        return [one.row for one in self._next() or self._smallest()]

    def take(self, fits: Sequence[Fit]) -> None:
        """Add predictions of wanted rows."""
        done = {fit.label for fit in fits}
        self.left = [one for one in self.left if one.label not in done]
        self.fits += fits
        for fit in fits:
            if fit.seconds and fit.need_bytes is not None:
                self.estimates.add(fit)

    def _roots(self) -> list[Point]:
        """Return the first rows: of one column, with all activations kept and with few.
        It is the first in the lattice's order whose weights may fit, usual ones before others; if
        none may, the smallest. A column whose rows failed comes after all others."""
        whole = [one for one in self.left
                 if not (one.quantized or one.swapped or one.moved)]  # fmt: skip
        some = [one for one in whole if one.state_bytes] or whole or self.left
        failed = {Point(fit.resolved).column for fit in self.fits}
        some = [one for one in some if one.column not in failed] or some
        if not some:
            return []
        small = [one for one in some if self.estimates.option(one, favour=True).sure]
        small.sort(key=lambda one: not usual(one.row))
        least = min(some, key=lambda one: one.state_bytes + one.gradient_bytes)
        first = small[0] if small else least
        alike = [one for one in some if one.column == first.column]
        ends = [pick(alike, key=lambda one: one.kept) for pick in (max, min)]
        return ends[: len(alike)]

    def _next(self) -> list[Point]:
        """Return the row that may be the answer, the best by estimate; none if there is none."""
        known = self.estimates.known
        best, likely = best_of(known), list[Option]()
        for one in self.left:
            option = self.estimates.option(one, favour=True)
            able = option.sure or (option.may and not (best and best.sure))
            # It may be the answer, or so fast that another row is.
            if able and best_of([*known, option]) is not best:
                likely.append(self.estimates.option(one, favour=False))
        first = best_of(likely) or min(likely, key=lambda option: option.need, default=None)
        return [first.point] if first else []

    def _smallest(self) -> list[Point]:
        """Return the row estimated to need the least of the GPU or the host, if none fits and it is
        not predicted; of equal ones that which keeps the least."""
        if not self.left or self.small == SMALLEST or able_of(self.estimates.known):
            return []

        def shortage(one: Point) -> tuple[float, float, int]:
            need = self.estimates.option(one, favour=False).need / self.gpu.memory_bytes
            host = host_bytes(one, self.gpu) / self.gpu.host_bytes(one.row.spec.processes)
            return (1 + share_of(one)) * max(need, host), one.kept, -one.swapped

        least, (short, *_) = min(((one, shortage(one)) for one in self.left), key=lambda it: it[1])
        if any(fit.need_bytes is not None and fit.shortage <= short for fit in self.fits):
            return []
        self.small += 1
        return [least]


def search(
    rows: Sequence[Resolved],
    gpu: Card,
    ask: Callable[[list[Resolved]], list[Fit]],
    recorded: Callable[[Resolved], Fit | None] = lambda row: None,
    *,
    alone: bool = False,
    first: bool = False,
) -> tuple[list[Fit], list[Search]]:
    """Search for the best adapter and the best training of all weights, side by side.
    Return all predictions, and the search of each of the two that the lattice has. ``ask`` predicts
    rows. ``recorded`` returns a prediction that ships with the project, if there is one; ``alone``:
    nothing else can be predicted; ``first``: one of them that fits is enough. Ctrl-C ends it with
    what is known."""
    kinds = [[row for row in rows if adapts(row) is frozen] for frozen in (True, False)]
    searches = [Search(some, gpu) for some in kinds if some]
    for one in searches:
        fits = [fit for point in one.left if (fit := recorded(point.row))]
        one.recorded = alone or len(fits) >= ENOUGH or (first and any(fit.fits for fit in fits))
        one.take(fits if one.recorded else ())
    try:
        while asked := [(one, row) for one in searches for row in one.wanted()]:
            fits = ask([row for _, row in asked])
            for one in searches:
                one.take([fit for (own, _), fit in zip(asked, fits, strict=True) if own is one])
    except KeyboardInterrupt:
        if not any(one.estimates.known for one in searches):
            raise
        for one in searches:
            one.stopped = True
    return [fit for one in searches for fit in one.fits], searches
