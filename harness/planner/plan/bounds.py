"""Bounds on the memory and time of recipes that were not predicted, from those that were.

A bound must not exceed what the recipe's own prediction would give;
``tests/predict/test_fastest.py`` compares both. No torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.planner import uncertainty
from harness.planner.overhead import fixed_overhead
from harness.planner.plan.lattice import HALF, Point
from harness.planner.speed.rates import rates
from harness.planner.speed.roofline import BUSY, KERNELS, Seconds, issue_seconds, issued, seconds
from harness.planner.verdict import Fit
from harness.prediction import Work
from harness.system.cards import Card

PRODUCTS = ("product", "attention")
REPEATED = (*KERNELS, "transfer", "collective", "overlapped")
"""Work of a forward pass that backward does again when it recomputes."""
SLACK = 160 * 2**20
"""Bytes by which a recipe that keeps more may need less: whole segments of the allocator.

Seen: 144 MiB, if 24 of PixArt's 28 blocks are streamed under LoRA; 20 MiB without streaming.
"""
SHARDED_SLACK = 2 * 2**30
"""The same where ranks hold shares. Seen: 1.7 GiB under ZeRO-2 and 0.9 under ZeRO-3, if DiT-XL/2
trains on 4 GPUs without checkpoints (docs/how-to/plan.md, "A third sample")."""
UNHIDDEN = 0.05
"""Estimate of the time of moved activations, over that of the forward pass."""
LIVE = 1.05
"""Factor from a recipe's state to an estimate of what the allocator reserves for it."""


class Known:
    """A prediction, with the seconds of its kernels."""

    def __init__(self, fit: Fit) -> None:
        self.fit, self.point = fit, Point(fit.resolved)

    @functools.cached_property
    def forward(self) -> float:
        """Seconds of the forward pass, at most, with the weights that it gathers and copies, if
        backward recomputes it: then the host's time counts twice (``roofline.issues``)."""
        work, gpu = self._work(BUSY[:1], REPEATED), self.fit.gpu
        host = 0.0 if gpu.shared else 2 * issue_seconds(gpu) * issued(work)
        return max(_timed(work, self.fit).total, host)

    @functools.cached_property
    def passes(self) -> Seconds:
        """Seconds of the forward and backward passes."""
        return _timed([w for w in self.fit.prediction.work if w.phase in BUSY], self.fit)

    @functools.cached_property
    def products(self) -> tuple[float, float]:
        """Seconds of matrix products and attentions: of the step, and of its forward pass."""
        return self._of(BUSY, PRODUCTS).compute, self._of(BUSY[:1], PRODUCTS).compute

    def _of(self, phases: Sequence[str], kinds: Sequence[str]) -> Seconds:
        return _timed(self._work(phases, kinds), self.fit)

    def _work(self, phases: Sequence[str], kinds: Sequence[str]) -> list[Work]:
        return [w for w in self.fit.prediction.work if w.phase in phases and w.kind in kinds]

    @functools.cached_property
    def activations(self) -> int:
        """Bytes that a forward pass keeps at least: those at the peak."""
        instant = self.fit.prediction.peak
        return instant.categories.get("activations", 0) if instant else 0

    @functools.cached_property
    def beyond(self) -> int:
        """The most bytes beyond the state in forward and backward."""
        return max((self.fit.prediction.beyond.get(phase, 0) for phase in BUSY), default=0)


def _timed(work: Sequence[Work], fit: Fit) -> Seconds:
    return seconds(work, fit.gpu, fit.resolved.spec.processes, fit.label)


# ---- rules ----


def slower(one: Point, other: Point) -> bool:
    """Return True if the column of ``one`` takes at least the time of the column of ``other``.

    The columns are equal, or ``one`` also decodes quantized weights or keeps its state on the host.
    Weights that autocast casts, or that are gathered or streamed, can take longer than quantized
    ones, so these are not compared. For adapters, ranks that hold all weights communicate the
    least.
    """
    hosted = one.sharding == f"{other.sharding}_offload"
    least = one.adapted and other.adapted and other.whole_ranks
    if not (one.sharding == other.sharding or hosted or least):
        return False
    plain = other.pure and not (other.quantized or other.splits or other.swapped)
    return one.rest == other.rest or (plain and one.plain == other.plain)


def time_floor(one: Point, known: Known) -> float:
    """Return seconds that a step of ``one`` takes at least, by the prediction of another recipe
    that trains the same weights.

    In a column that is not faster (``slower``), recomputing, moving or streaming more takes no
    less, and recomputing less saves at most one forward pass. With another optimizer that holds for
    the forward and backward passes. In any column, the matrix products and attentions are the same,
    and an optimizer on the host steps after them.

    On several GPUs a recipe that recomputes more may make fewer calls, and be up to 2.5 % faster.
    Such a gain is given up: to look for it costs half as many predictions again.
    """
    other = known.point
    less = not other.holds(one)
    whole, forward = known.products
    gpu = known.fit.gpu
    stepped = max(hosted_seconds(one, gpu), stepped_seconds(one, gpu))
    busy = whole - (forward if less else 0.0)
    if not _factors(gpu):  # computation hides a share of its own time alone
        busy = max(busy, (1 - rates(gpu, one.ranks).overlap) * busy + wire_seconds(one, gpu))
    least = max(busy + stepped, moved_seconds(one, known))
    if one.swapped < other.swapped or (other.moved and not one.moves(other)):
        return least
    if slower(one, other):
        found, stepped = known.fit.seconds, 0.0
    elif _alike_but_for_step(one, other):
        found = known.passes
    else:
        return least
    # The optimizer works while the host is late. Another engine gathers shards in other groups, so
    # the host's share of its time is no bound.
    total = found.total - found.overhead + stepped
    if one.sharding == other.sharding:
        total = max(total, found.total)
    return max(least, total - (known.forward if less else 0.0))


def _alike_but_for_step(one: Point, other: Point) -> bool:
    """Return True if the passes of ``one`` take no less than those of ``other``."""
    early = "early_gradients" in other.traits
    return one.passes == other.passes and one.swapped == other.swapped and not early


def moved_seconds(one: Point, known: Known) -> float:
    """Return seconds in which all activations are copied to the host and back, at least.

    They are more than half of the bytes that another recipe keeps at its peak; the rest may be kept
    outside of the blocks.
    """
    if not one.moved or one.share:
        return 0.0
    kept = kept_floor(one, known)
    return kept / rates(known.fit.gpu, one.ranks).to_host * least_factor(known.fit.gpu)


def kept_floor(one: Point, known: Known) -> int:
    """Return the fewest bytes of activations that ``one`` keeps if it holds those of ``known``.

    Autocast keeps float32 results, and 16-bit copies of float32 weights. Recipes of 16-bit
    activations keep neither, and recipes that decode frozen weights keep no such copies.
    """
    lean = one.half or one.quantized
    return 0 if lean and not known.point.half else known.activations


def stepped_seconds(one: Point, gpu: Card) -> float:
    """Return the fewest seconds of an optimizer on the device: it reads gradients, writes weights,
    and reads and writes its state."""
    if one.adapted or one.traits & {"host_weights", "host_optimizer"}:
        return 0.0
    gradient = HALF if one.shards else one.weight_bytes
    each = one.weight_bytes + gradient + 2 * one.optimizer_bytes
    elements = (one.elements - one.stepped_away) / (one.ranks if one.shards else 1)
    found = rates(gpu, one.ranks)
    sizes = [stream.bytes for stream in found.streams] or [1]
    return each * elements / max(map(found.streaming, sizes)) * least_factor(gpu)


def hosted_seconds(one: Point, gpu: Card) -> float:
    """Return the fewest seconds of an optimizer on the host: it reads and writes its state, and of
    streamed blocks also the weights, and reads their gradients."""
    if not one.hosts_optimizer and (one.adapted or not one.swapped):
        return 0.0
    each = 2 * one.optimizer_bytes + (3 * one.weight_bytes if one.swapped else 0.0)
    elements = one.elements / one.ranks if one.hosts_optimizer else one.stepped_away
    return each * elements / rates(gpu, one.ranks).host * least_factor(gpu)


def wire_seconds(one: Point, gpu: Card) -> float:
    """Return seconds in which a rank sends what it must.

    Weights of which it keeps a share are gathered at least once, and gradients are averaged in 16
    bits.
    """
    each = min(one.weight_bytes, HALF) if "half_compute" in one.traits else one.weight_bytes
    sent = each * one.elements if one.splits else 0.0
    sent += 0.0 if one.adapted else HALF * one.elements
    wire = rates(gpu, one.ranks).wire
    return sent * (one.ranks - 1) / one.ranks / wire * least_factor(gpu) if one.ranks > 1 else 0.0


def least_factor(gpu: Card) -> float:
    """Return the smallest factor by which measured steps correct a part of the time, at most 1."""
    return min([1.0, *_factors(gpu).values()])


def _factors(gpu: Card) -> Mapping[str, float]:
    return gpu.calibrated.fitted.factors if gpu.calibrated else {}


def copies_floor(one: Point, gpu: Card) -> float:
    """Return seconds in which a step sends and copies what it must, if kernels take no time.

    Streamed weights arrive for forward and for backward. Weights that wait on the host arrive at
    least once.
    """
    waits = 2 * one.streamed + (one.elements / one.ranks if one.hosts_weights else 0)
    streamed = one.weight_bytes * waits / rates(gpu, one.ranks).to_host * least_factor(gpu)
    return max(streamed, wire_seconds(one, gpu), hosted_seconds(one, gpu))


def need_floor(one: Point, known: Known) -> float:
    """Return bytes that a GPU needs at least for ``one``, by the prediction of another recipe that
    trains the same weights.

    In the same column, a recipe that keeps more on the device needs no less, but for slack, and
    streaming frees at most the bytes of the streamed blocks. In another column, ``one`` keeps at
    least the activations of ``known``, beside a state of its own size.
    """
    other = known.point
    if not one.holds_here(other):
        return 0.0
    slack = SHARDED_SLACK if one.shards and one.ranks > 1 and not one.adapted else SLACK
    if one.column == other.column:
        return known.fit.need_bytes - one.frees(other) - slack
    return fixed(one, known.fit.gpu) + one.state_bytes + kept_floor(one, known) - slack


def fixed(one: Point, gpu: Card) -> int:
    """Return the bytes beside tensors, and of the models that stay on the GPU."""
    sharding = one.row.recipe.sharding.name
    return fixed_overhead(gpu, one.row.spec.processes, sharding).total + gpu.beside


def host_floor(one: Point, gpu: Card) -> float:
    """Return the fewest bytes that the ranks of one node keep in host memory."""
    waits, each = one.streamed, one.hosted_bytes
    if one.hosts_optimizer:
        waits, each = one.elements, one.optimizer_bytes
    here = min(gpu.node, one.row.spec.processes)
    return each * waits * here / (one.ranks if one.shards else 1)


def share_of(one: Point) -> float:
    """Return the smallest uncertainty that the memory of a recipe can have."""
    shares, traits = uncertainty.shares(), one.traits
    own = "offloaded" if traits & uncertainty.HOSTED else "sharded" if one.shards else "one GPU"
    return min(shares[kind].share for kind in {own, "set-up", "beside the step"})


# ---- all of them ----


@dataclass(kw_only=True)
class Bounds:
    """Bounds from the predictions ``known``, all of recipes that train the same weights."""

    gpu: Card
    known: list[Known] = field(default_factory=list)

    def seconds(self, one: Point) -> float:
        """Return seconds that a step of ``one`` takes at least."""
        return max([copies_floor(one, self.gpu), *(time_floor(one, k) for k in self.known)])

    def need(self, one: Point) -> float:
        """Return bytes that ``one`` needs of a GPU at least."""
        least = fixed(one, self.gpu) + one.state_bytes + one.gradient_bytes
        return max([least, *(need_floor(one, known) for known in self.known)])

    def may_fit(self, one: Point, sure: bool) -> bool:
        """Return True if the bounds leave open that ``one`` fits.

        ``sure``: by the upper ends of its ranges, else by the lower ends.
        """
        most = max(share.share for share in uncertainty.shares().values())
        factor = 1 + share_of(one) if sure else 1 - most
        own = factor * (self.need(one) - self.gpu.beside) + self.gpu.beside
        have = self.gpu.host_bytes(one.row.spec.processes)
        return own <= self.gpu.memory_bytes and factor * host_floor(one, self.gpu) <= have

    # ---- estimates, which decide the order alone ----

    def likely_need(self, one: Point) -> float:
        """Return an estimate of the bytes that ``one`` needs of a GPU."""
        kept, least = self._likely_beyond(one), self.need(one)
        same = [known for known in self.known if known.point.column == one.column]
        if not same:
            held = LIVE * one.state_bytes + max(one.gradient_bytes, kept)
            return max(least, fixed(one, self.gpu) + held)
        near = min(same, key=lambda known: known.point.apart(one))
        freed = one.frees(near.point) - near.point.frees(one)
        return max(least, near.fit.need_bytes + kept - near.beyond - freed)

    def _likely_beyond(self, one: Point) -> float:
        """Return an estimate of the activations of ``one``, on a line through predictions."""
        if not self.known:
            return 0.0
        low, high = (pick(self.known, key=lambda k: k.point.kept) for pick in (min, max))
        width = high.point.kept - low.point.kept
        if not width:
            return sum(known.beyond for known in self.known) / len(self.known)
        share = (one.kept - low.point.kept) / width
        return max(0.0, low.beyond + share * (high.beyond - low.beyond))

    def likely_seconds(self, one: Point) -> float:
        """Return an estimate of the seconds of a step of ``one``."""

        def apart(known: Known) -> tuple[bool, float, int]:
            other = known.point
            return other.column != one.column, one.apart(other), abs(other.swapped - one.swapped)

        near = min(self.known, key=apart)
        steps = one.again - near.point.again
        copies = copies_floor(one, self.gpu) - copies_floor(near.point, self.gpu)
        copies += UNHIDDEN * near.forward * (one.moved - near.point.moved)
        likely = near.fit.seconds.total + steps * near.forward + copies
        return max(self.seconds(one), likely)

    def likely_shortage(self, one: Point) -> float:
        """Return an estimate of a need's upper end over what there is, of the GPU or the host."""
        host = host_floor(one, self.gpu) / self.gpu.host_bytes(one.row.spec.processes)
        need = self.likely_need(one) / self.gpu.memory_bytes
        return (1 + share_of(one)) * max(need, host)

    def likely_fits(self, one: Point) -> bool:
        """Return True if ``one`` is estimated to fit."""
        return self.likely_need(one) * (1 + share_of(one)) <= self.gpu.memory_bytes
