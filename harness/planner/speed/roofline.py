"""Roofline model of a step's time: each op takes its FLOPs or its bytes, whichever is slower.
The trace counts the work (``harness.planner.tracing.trace.Counter``), which does not depend on the
GPU. ``rates`` has typical efficiencies, or measured ones of a calibrated card. The uncertainty
follows from public rows, or from the calibration's. Does not import torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.planner import uncertainty
from harness.planner.calibration.record import Fitted
from harness.planner.speed.rates import FAR_HOP, HOP, ISSUE, RECOMPUTING, Rates, rates
from harness.prediction import Sent, Work
from harness.system.cards import NODE, Card

BUSY = ("forward", "backward")
COLLECTIVES = ("collective", "overlapped")
KERNELS = ("product", "attention", "memory")
COPIES = ("transfer", "streamed")
SPREAD = {"compute": 0.35, "communication": 0.50, "offload": 0.60}
"""Relative uncertainty of each part without calibration, for comparisons of rows."""
CPU_SPREAD = dict.fromkeys(SPREAD, 1.0)
"""Relative uncertainty on a CPU known only by its cores; half or twice the time is common."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Predicted seconds of one optimizer step, by part.
    ``overhead``: the time by which the host issues all operations later than the device could run
    them. ``slowest``: seconds in which the slowest host of all issues them. ``shares``: part ->
    relative uncertainty in comparisons. ``low`` and ``high``: the range, which is longer upwards:
    loading, encoding in the step and older libraries make a step longer, and nothing shorter."""

    compute: float
    communication: float
    offload: float
    overhead: float = 0.0
    slowest: float = 0.0
    shares: Mapping[str, float] = field(default_factory=lambda: SPREAD)
    low: float = 0.0
    high: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.offload + self.overhead

    @property
    def spread(self) -> float:
        """Uncertainty in comparisons of rows, plus or minus.
        It is wider than the range, because it decides which rows a search may leave out."""
        known = sum(share * getattr(self, part) for part, share in self.shares.items())
        return max(known, self.slowest - self.total)

    @property
    def words(self) -> str:
        """Milliseconds with their range, for a table: 605 (466-787)."""
        total, low, high = (f"{1e3 * one:.0f}" for one in (self.total, self.low, self.high))
        return f"{total} ({low}-{high})"


def in_tf32(recipe: str) -> bool:
    """Return whether ``recipe`` rounds the float32 operands of matrix products to TF32."""
    return "tf32" in recipe.split("+")


def compiles(recipe: str) -> bool:
    """Return whether ``recipe`` compiles the blocks."""
    return any(part.partition(":")[0] == "compile" for part in recipe.split("+"))


def seconds(work: Sequence[Work], gpu: Card, processes: int, recipe: str = "") -> Seconds:
    """Return the predicted seconds of one step of ``recipe`` on ``gpu``, for one of ``processes``.
    The host's time to issue operations is that of public trainers, unless whole steps were
    measured."""
    found = rates(gpu, processes)
    parts = parts_of(work, found, processes, in_tf32(recipe))
    fitted = _fitted(gpu)
    seconds_of = {part: fitted.factors.get(part, 1.0) * value for part, value in parts.items()}
    calls = 0.0 if gpu.shared else issues(work)
    asked = 0 if gpu.shared or fitted.rows else issued(work)  # measured steps replace public hosts
    overhead = max(0.0, issue_seconds(gpu) * calls - sum(seconds_of.values()))
    low, high = _range(seconds_of, overhead, gpu, fitted.host * calls)
    if compiles(recipe):  # at the least no elementwise kernel, and no host's time
        parts = parts_of([w for w in work if w.kind != "memory"], found, processes)
        fused = {part: fitted.factors.get(part, 1.0) * value for part, value in parts.items()}
        low, _ = _range(fused, 0.0, gpu, 0.0)
    return Seconds(
        **seconds_of,
        overhead=overhead,
        slowest=RECOMPUTING * asked,
        shares={**(CPU_SPREAD if gpu.shared else SPREAD), **fitted.shares},
        low=low,
        high=high,
    )


def _range(
    seconds_of: Mapping[str, float], overhead: float, gpu: Card, host: float
) -> tuple[float, float]:
    """Return the ends of a step's time.
    Without calibration they are that of public rows (``uncertainty.reach``). A calibrated card has
    the uncertainty of its own rows for each part, or of its ``host`` if that is the later."""
    fitted, total = _fitted(gpu), sum(seconds_of.values()) + overhead
    if not (gpu.shared or fitted.rows):
        reach = uncertainty.reach()
        return reach.low * total, reach.high * total
    shares = {**(CPU_SPREAD if gpu.shared else SPREAD), **fitted.shares}
    most = max(fitted.shares.values(), default=0.0)
    low = sum(seconds / (1 + shares[part]) for part, seconds in seconds_of.items())
    high = sum(seconds * (1 + shares[part]) for part, seconds in seconds_of.items())
    return max(low, host / (1 + most)), max(high, host * (1 + most))


def _fitted(gpu: Card) -> Fitted:
    return gpu.calibrated.fitted if gpu.calibrated else Fitted()


def issue_seconds(gpu: Card) -> float:
    """Return the seconds in which the host issues one operation; 0 if measured steps show none."""
    fitted = _fitted(gpu)
    return fitted.host if fitted.rows else ISSUE


def issued(work: Sequence[Work]) -> int:
    """Return the number of kernels and copies that the host issues in a step."""
    return sum(w.count for w in work if w.kind in (*KERNELS, *COPIES))


def issues(work: Sequence[Work]) -> float:
    """Return the number of operations as a host's time counts them: recomputed ones count twice.
    Backward recomputes them in Python, with hooks and the state of random numbers."""
    forward = sum(w.count for w in work if w.phase == "forward" and w.kind in KERNELS)
    return issued(work) + again(work) * forward


def again(work: Sequence[Work]) -> float:
    """Return the share of a forward pass that backward runs again, by its attentions' FLOPs."""
    first, repeated = Counter[int](), Counter[int]()
    for w in work:
        if w.kind == "attention" and w.phase in BUSY:
            (first if w.phase == "forward" else repeated)[w.flops] += w.count
    count = sum(repeated[flops] for flops in first)
    return min(1.0, count / first.total()) if first else 0.0


def parts_of(
    work: Sequence[Work], found: Rates, processes: int, tf32: bool = False
) -> dict[str, float]:
    """Return the seconds of each part of a step, from the rates alone."""
    busy = sum(_compute(w, found, tf32) for w in work if w.phase in BUSY)
    # A rank waits so long in its pipeline, relative to its own forward and backward computation.
    waits = sum((w.group - 1) / w.count for w in work if w.kind == "chain")
    compute = sum(_compute(w, found, tf32) for w in work) + waits * busy
    shown = sum(_collective(w, found, processes) for w in work if w.kind == "collective")
    left, late = [], []
    for phase in (*BUSY, "optimizer"):
        here = [w for w in work if w.phase == phase]
        hides = found.overlap * sum(_compute(w, found, tf32) for w in here)
        if phase in BUSY:  # overlapped collectives that computation cannot hide
            wire = sum(_collective(w, found, processes) for w in here if w.kind == "overlapped")
            left.append(max(0.0, wire - hides))
        # Streamed copies that neither computation nor host work hides; those in and out are
        # counted one after the other.
        copied = sum(w.count * w.bytes for w in here if w.kind == "streamed") / found.to_host
        hosted = sum(_offload(w, found) for w in here if w.kind == "host")
        late.append(max(0.0, copied - (hides + hosted)))
    return {
        "compute": compute,
        "communication": shown + sum(left),
        "offload": sum(late) + sum(_offload(w, found) for w in work),
    }


def _compute(w: Work, found: Rates, tf32: bool) -> float:
    if w.kind not in KERNELS:
        return 0.0
    if w.kind == "attention":
        rate = found.attention(w.dtype, tokens(w))
    else:
        rate = found.product(w.dtype, tf32, depth(w))
    by_flops = w.flops / rate if w.flops else 0.0
    return w.count * max(by_flops, w.bytes / found.streaming(w.bytes), found.launch)


def tokens(w: Work) -> float:
    """Return the tokens of an attention, by its FLOPs for each byte of its operands.
    Forward does 4 T FLOPs for 4 numbers of a token and channel; backward 10 T for 8. What backward
    computes again is read as a fifth shorter."""
    numbers = w.bytes / (4 if w.dtype == "float32" else 2)
    return (1.0 if w.phase == "forward" else 0.8) * w.flops / numbers if numbers else math.inf


def depth(w: Work) -> float:
    """Return a product's multiplications for each number moved, M N K / (M N + N K + K M)."""
    size = {"float32": 4, "float8": 1}.get(w.dtype, 2)
    return size * w.flops / (2 * w.bytes) if w.bytes else math.inf


def sent(work: Sequence[Work], processes: int, node: int = NODE) -> Sent:
    """Return the bytes that a rank sends in one step, if groups of ``node`` ranks need no
    network."""
    totals = [0, 0]
    for w in work:
        if w.kind in COLLECTIVES:
            group = w.group or processes
            totals[_crosses(w, group, node)] += w.count * w.bytes * (group - 1) // group
    return Sent(*totals)


def _crosses(w: Work, group: int, node: int) -> bool:
    """Return True if the ranks of a collective are in several nodes."""
    return w.stride * (group - 1) >= node


def _collective(w: Work, found: Rates, processes: int) -> float:
    """Return the seconds of a ring collective; every rank sends (n - 1) / n of the bytes.
    Ranks that are ``stride`` apart leave the rails of a node to as many rings, which share its
    network."""
    group, card = w.group or processes, found.gpu
    on_wire = w.bytes * (group - 1) / group
    crosses = _crosses(w, group, card.linked)
    rails = min(w.stride, card.node) if crosses and not card.shared else 1
    wire = found.far_wire / rails if crosses else found.wire
    return w.count * (latency(found, group, w.stride) + on_wire / wire)


def latency(found: Rates, group: int, stride: int = 1) -> float:
    """Return the seconds that a ring of ``group`` ranks takes however little it sends."""
    card = found.gpu
    nodes = -(-group * stride // card.linked)
    if card.shared or nodes < 2:
        return found.collective_seconds
    far = min(nodes, group - 1)
    near = max(0, group - 1 - far - (card.linked - 1))
    return found.collective_seconds + near * HOP + far * FAR_HOP


def _offload(w: Work, found: Rates) -> float:
    rate = {"transfer": found.to_host, "host": found.host, "nvme": found.nvme}.get(w.kind)
    return w.count * w.bytes / rate if rate else 0.0
