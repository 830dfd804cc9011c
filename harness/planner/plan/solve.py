"""The fastest plan of a training by block, found by an integer program (``plan --solve``).

``block_costs`` traces what a block costs under each choice. The MILP solver of scipy, which comes
with scikit-learn, decides how many blocks of each group take each choice, and how many are
streamed. The recipe that follows is then predicted whole, and the error of its need corrects the
costs. Does not import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from harness.commands.console import OK
from harness.json_files import write_json
from harness.planner import pool, uncertainty, verdict
from harness.planner.plan import lattice
from harness.planner.plan.answer import rate_in_words, reach
from harness.planner.plan.block_costs import (
    CHOICES,
    FFN,
    HOSTED,
    KEEP,
    NOTHING,
    Costs,
    Measure,
    Plan,
    costs_of,
)
from harness.planner.plan.candidates import PlanError
from harness.planner.plan.fastest import Search, run
from harness.planner.plan.request import fit_as_json
from harness.planner.plan.table import print_lines, print_plan
from harness.planner.speed.rates import Rates, rates
from harness.planner.speed.roofline import (
    KERNELS,
    attentions,
    in_tf32,
    issue_seconds,
    issued,
    kernels_of,
    parts_of,
)
from harness.planner.suggestions import changed
from harness.planner.verdict import Fit
from harness.prediction import Work
from harness.report.figures.units import GIB, MIB
from harness.resolve import Resolved
from strategies import CATALOG
from strategies.base import Slot
from strategies.words import name_of
from strategies.workloads import SAMPLE

if TYPE_CHECKING:
    from rich.console import Console

    from harness.planner.plan.tracing import Asking

ROUNDS = 4
"""Most plans that are predicted whole."""
LATE = ("forward", "backward", "optimizer")
"""Phases whose computation hides copies."""
EQUAL = 0.005
"""Relative difference of two steps below which neither is called faster."""
SIMPLER = 1e-6
"""Milliseconds by which a block that keeps counts as faster, to decide between equal plans."""
ALONE = ("single", "ddp")
"""Shardings that one GPU has: replicas on one GPU are plain training."""
Terms = dict[Any, float]
"""Variable -> its coefficient; the constant is the term of ``ONE``."""
ONE = "one"


def refuse(options: argparse.Namespace) -> None:
    """Refuse what ``--solve`` does not answer, and set one GPU as its default.

    Raises:
        PlanError: an option that excludes it.
    """
    if not options.solve:
        return
    for name in ("largest", "check", "advise", "scale", "source", "suite", "cpu"):
        if getattr(options, name):
            word = {"source": "from"}.get(name, name)
            raise PlanError(f"--solve and --{word} exclude each other; leave one out")
    if options.workload == SAMPLE:
        raise PlanError("--solve decides what waits for backward, and samples have none")
    count = len(options.recipes or ())
    if count > 1:
        raise PlanError(f"--solve takes one recipe or none, and {count} are named; name one")
    for word in "+".join(options.recipes or ()).split("+"):
        name = name_of(word, CATALOG)
        if name in CATALOG and CATALOG[name].slot == Slot.SHARD and name not in ALONE:
            raise PlanError(f"--solve plans one GPU, and {name} is for several; take single")
    if options.processes not in (None, 1):
        raise PlanError(
            f"--solve plans one GPU, and gpus is {options.processes}: blocks whose weights or "
            "gradients are shared were not tried by plans; leave --gpus out"
        )
    options.processes = 1


# ---- program ----


@dataclass
class Program:
    """Linear program with integers: minimise a sum under constraints ``low <= sum``."""

    names: dict[Any, int] = field(default_factory=dict)
    whole: list[int] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    rows: list[tuple[Terms, float]] = field(default_factory=list)

    def variable(self, name: Any, most: float, *, whole: bool = True) -> None:
        """Add a variable from 0 to ``most``."""
        self.names[name] = len(self.names)
        self.whole.append(int(whole))
        self.most.append(most)

    def hold(self, terms: Mapping[Any, float], low: float = 0.0) -> None:
        """Demand that the sum is at least ``low``."""
        self.rows.append((dict(terms), low))

    def least(self, terms: Mapping[Any, float]) -> dict[Any, float] | None:
        """Return the values of all variables at the minimum; None if nothing is allowed."""
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp

        goal, matrix = np.zeros(len(self.names)), np.zeros((len(self.rows), len(self.names)))
        lows = np.array([low - terms.get(ONE, 0.0) for terms, low in self.rows])
        for name, index in self.names.items():
            goal[index] = terms.get(name, 0.0)
            matrix[:, index] = [row.get(name, 0.0) for row, _ in self.rows]
        found = milp(
            goal,
            constraints=LinearConstraint(matrix, lows, np.inf),
            bounds=Bounds(0, self.most),
            integrality=self.whole,
            options={"mip_rel_gap": 0.0},
        )
        return None if found.x is None else dict(zip(self.names, found.x, strict=True))


def plus(*each: tuple[float, Mapping[Any, float]]) -> Terms:
    """Return a sum of terms, each times a number."""
    total: Terms = defaultdict(float)
    for times, terms in each:
        for name, value in terms.items():
            total[name] += times * value
    return total


def _ops(work: Mapping[Work, float]) -> list[Work]:
    return [replace(one, count=count) for one, count in work.items()]


def _parts(work: Mapping[Work, float], found: Rates, tf32: bool) -> Terms:
    """Return seconds of work: of all kernels, of copies that nothing hides, of each phase's hidden
    copies and what hides them; and the number of operations."""
    ops = _ops(work)

    def of(part: str, kinds: Sequence[str], phase: str = "") -> float:
        some = [one for one in ops if one.kind in kinds and phase in ("", one.phase)]
        return parts_of(some, found, 1, tf32)[part]

    sums = {"compute": of("compute", KERNELS), "issued": float(issued(ops))}
    sums["plain"] = of("offload", ("transfer", "host", "nvme"))
    for phase in LATE:
        sums["copied", phase] = of("offload", ("streamed",), phase)
        hides = found.overlap * of("compute", KERNELS, phase) + of("offload", ("host",), phase)
        sums["hides", phase] = hides
    return sums


def allowed(costs: Costs, kind: str) -> float:
    """Return the most bytes that a plan may need on the GPU, if its class of uncertainty is
    ``kind``."""
    gpu, share = costs.gpu, uncertainty.shares()[kind].share
    return (gpu.memory_bytes - gpu.beside) / (1 + share) + gpu.beside


def limits(costs: Costs) -> tuple[float, float, float]:
    """Return the most bytes of the GPU, for plans without and with copies to the host, and of the
    host."""
    plain = allowed(costs, costs.anchor.uncertainty.kind)
    share = uncertainty.shares()["offloaded"].share
    have = costs.gpu.host_bytes(1) / (1 + share)
    return plain, min(plain, allowed(costs, "offloaded")), have


def solve(costs: Costs) -> Plan | None:
    """Return the fastest plan that fits by ``costs``; None if none does."""
    places = [(g, c) for g in range(len(costs.groups)) for c in range(len(CHOICES))]
    program = Program()
    for g, c in places:
        program.variable(("blocks", g, c), 0 if (g, c) in costs.absent else costs.groups[g])
        program.variable(("any", g, c), 1)
    for count in costs.swaps:
        program.variable(("swapped", count), 1)
    program.variable("hosted", 1)
    for name in (*((phase, "late") for phase in LATE), "over"):
        program.variable(name, float("inf"), whole=False)
    _counted(program, costs, places)
    _in_memory(program, costs, places)
    values = program.least(_time(program, costs, places))
    if values is None:
        return None
    counts = tuple(
        tuple(round(values["blocks", g, c]) for c in range(len(CHOICES)))
        for g in range(len(costs.groups))
    )
    return Plan(counts, next(n for n in costs.swaps if values["swapped", n] > 0.5))


def _counted(program: Program, costs: Costs, places: Sequence[tuple[int, int]]) -> None:
    """Each block takes one choice, and one number of blocks is streamed."""
    for g, count in enumerate(costs.groups):
        each = {("blocks", g, c): 1.0 for c in range(len(CHOICES))}
        program.hold(each, count)
        program.hold(plus((-1, each)), -count)
    for g, c in places:
        program.hold({("any", g, c): costs.groups[g], ("blocks", g, c): -1})
        if c in HOSTED:
            program.hold({"hosted": costs.groups[g], ("blocks", g, c): -1})
        if c == FFN:  # block_swap refuses it
            program.hold({("swapped", 0): costs.groups[g], ("blocks", g, c): -1})
    one = {("swapped", count): 1.0 for count in costs.swaps}
    program.hold(one, 1)
    program.hold(plus((-1, one)), -1)
    program.hold({"hosted": 1, **{("swapped", n): -1.0 for n in costs.swaps if n}})


def _sum(costs: Costs, value: Any) -> Terms:
    """Return the terms of a number of ``Measure`` over the whole plan."""
    terms: Terms = {ONE: value(costs.rest)}
    terms |= {("swapped", count): value(one) for count, one in costs.swaps.items()}
    for g, group in enumerate(costs.blocks):
        terms |= {("blocks", g, c): value(one) for c, one in enumerate(group)}
    return terms


def _in_memory(program: Program, costs: Costs, places: Sequence[tuple[int, int]]) -> None:
    """Each run's backward pass fits, and so does all else, in GiB."""
    plain, hosted, host = limits(costs)
    busy, rest = costs.needs
    room: Terms = {ONE: (plain - costs.off) / GIB, "hosted": (hosted - plain) / GIB}
    for count, one in costs.swaps.items():
        room["swapped", count] = -one.live / GIB
    program.hold(plus((1, room), (-1, {ONE: rest / GIB})))
    start, kept = busy - costs.level(costs.uniform.counts), {}
    for g, c in places:
        kept["blocks", g, c] = costs.blocks[g][c].beyond / GIB
        own = {ONE: start / GIB, ("any", g, c): costs.beside[c] / GIB}
        program.hold(plus((1, room), (-1, kept), (-1, own)))
    used = _sum(costs, lambda one: one.host / GIB)
    program.hold(plus((1, {ONE: (host - costs.host_off) / GIB}), (-1, used)))


def _time(program: Program, costs: Costs, places: Sequence[tuple[int, int]]) -> Terms:
    """Constrain a step's time as ``roofline.seconds`` has it, and return it in milliseconds."""
    found, tf32 = rates(costs.gpu, 1), in_tf32(costs.anchor.label)
    parts: dict[int, Terms] = {}

    def part(name: Any) -> Terms:
        def value(one: Measure) -> float:
            if id(one) not in parts:
                parts[id(one)] = _parts(one.work, found, tf32)
            return 1e3 * parts[id(one)][name]

        return _sum(costs, value)

    for phase in LATE:
        late, hides = {(phase, "late"): 1.0}, part(("hides", phase))
        program.hold(plus((1, late), (-1, part(("copied", phase))), (1, hides)))
    late = dict.fromkeys(((phase, "late") for phase in LATE), 1.0)
    offload, compute = plus((1, part("plain")), (1, late)), part("compute")
    fitted = costs.gpu.calibrated.fitted if costs.gpu.calibrated else None
    factors = fitted.factors if fitted else {}
    weights = [factors.get(name, 1.0) for name in ("compute", "offload")]
    device = [(weights[0], compute), (weights[1], offload)]
    program.hold(plus((1, {"over": 1}), *device, *_host(costs, part("issued"))))
    simpler = {("blocks", g, c): SIMPLER for g, c in places if c != KEEP}
    simpler |= {("swapped", count): SIMPLER for count in costs.swaps if count}
    return plus((weights[0], compute), (weights[1], offload), (1, {"over": 1}), (1, simpler))


def _host(costs: Costs, issued: Terms) -> list[tuple[float, Terms]]:
    """Return the negative time of the host in milliseconds, as ``roofline.issues`` counts it.

    All plans have the same forward pass, so what they recompute is linear in their attentions.
    """
    whole = _ops(costs.total(costs.uniform).work)
    first = attentions(whole, "forward")

    def repeated(one: Measure) -> float:
        found = attentions(_ops(one.work), "backward")
        return float(sum(found[flops] for flops in first))

    each = kernels_of(whole, "forward") / first.total() if first else 0.0
    issue = issue_seconds(costs.gpu)
    return [(-issue, issued), (-1e3 * issue * each, _sum(costs, repeated))]


# ---- answer ----


@dataclass(frozen=True, kw_only=True)
class Solved:
    """The answer: the fastest plan that fits when predicted whole, and the best uniform recipe.

    Either is None if none fits. ``tried``: plans with their predictions.
    """

    costs: Costs
    plan: Plan | None
    best: Fit | None
    uniform: Fit | None
    tried: Mapping[Plan, Fit]

    @property
    def gain(self) -> float | None:
        """Share of the best uniform recipe's step that the plan saves; None without both."""
        if not (self.best and self.uniform):
            return None
        return 1 - self.best.seconds.total / self.uniform.seconds.total

    @property
    def as_json(self) -> dict[str, Any]:
        """The answer as plain data."""
        of = {"plan": self.best, "uniform": self.uniform}
        found: dict[str, Any] = {name: fit and fit_as_json(fit) for name, fit in of.items()}
        counts = self.plan and [dict(zip(NAMES, group, strict=True)) for group in self.plan.counts]
        return {**found, "gain": self.gain, "blocks": counts, "tried": len(self.tried)}


NAMES = [choice.name for choice in CHOICES]


def solved(row: Resolved, asking: Asking) -> Solved:
    """Solve the training of ``row``, whatever its blocks do, and predict the answer whole."""
    costs = first = costs_of(row, asking)
    tried: dict[Plan, Fit] = {}
    while len(tried) < ROUNDS:
        plan = solve(costs)
        made = changed(row, plan.edit, 1) if plan and plan not in tried else None
        if made is None:
            break
        (tried[plan],) = asking.fits([made], "Plan by block: ")
        if tried[plan].need_bytes is not None:
            costs = costs.corrected(plan, tried[plan])
        elif plan.swapped:  # streamed weights beside some choice cannot be traced
            costs = replace(costs, swaps={0: NOTHING})
        else:
            break
    best = verdict.fastest([fit for fit in tried.values() if fit.fits])
    plan = next((plan for plan, fit in tried.items() if fit is best), None)
    uniform = _best_uniform(row, asking)
    return Solved(costs=first, plan=plan, best=best, uniform=uniform, tried=tried)


def _best_uniform(row: Resolved, asking: Asking) -> Fit | None:
    """Return the fastest recipe of the lattice that fits, of those with the same other parts."""
    rows = [one for one in _uniform(row) if one]
    one = Search(rows, asking.asked.gpu, common=lambda _: True)
    run([one], lambda pairs: asking.fits([row for _, row in pairs], "Best uniform recipe: "))
    return verdict.fastest([fit for fit in one.fits if fit.fits])


def _uniform(row: Resolved) -> Iterator[Resolved | None]:
    alone = (*lattice.PARTS, *lattice.LAYERS, *lattice.KEPT)
    for level in ("", *alone, lattice.PRODUCTS, lattice.WHOLE, lattice.MOVED):
        words = level.split("+")
        edit = {Slot.RECOMPUTE: "", Slot.OFFLOAD: ""}
        for word in filter(None, words):
            edit[Slot.OFFLOAD if word.startswith("offload") else Slot.RECOMPUTE] = word
        for count in [0] if level in alone else [0, *lattice.swaps(row.subject.depth)]:
            swap = f"block_swap:blocks={count}" if count else ""
            yield changed(row, {**edit, Slot.SWAP: swap}, 1)


def plan_solved(options: argparse.Namespace, asking: Asking, console: Console) -> int:
    """Solve the named recipe's training, or that of the plan's answer, print it, and return the
    exit code."""
    with pool.kept_workers():
        found = solved(_trained(options, asking), asking)
    shown = {fit.label: fit for fit in (found.best, found.uniform, found.costs.anchor) if fit}
    print_lines([*lines(found)], console)
    print_plan([*shown.values()], [], [], None, console, whole=options.notes)
    if options.json:
        gpu = dataclasses.asdict(asking.asked.gpu)
        write_json(options.json, {"gpu": gpu, "solved": found.as_json})
    return OK


def _trained(options: argparse.Namespace, asking: Asking) -> Resolved:
    if options.recipes:
        (row,) = asking.asked.resolved
    else:
        rows = [row for row in asking.asked.resolved if "one_process" in row.launch.traits]
        told, proofs = asking.search(rows)
        fit = verdict.fastest([p.best for p in proofs if p.best]) or verdict.nearest(told)
        if fit is None:
            raise PlanError("no recipe could be predicted; name one with --recipes")
        row = fit.resolved
    return row


def lines(found: Solved) -> Iterator[str]:
    """Yield the answer: what blocks do, what it gains, and what a block costs."""
    if found.best is None:
        tried = len(found.tried)
        yield "No plan by block is sure to fit" + (
            f", of {tried} predicted" if tried else ": what blocks need at least is too much"
        )
    else:
        best = found.best
        yield f"By block: {best.label}, {rate_in_words(best)}, {reach(best)}"
        for group in found.plan.counts:
            each = (f"{number} {name}" for number, name in zip(group, NAMES, strict=True) if number)
            yield f"  {sum(group)} block{'s' * (sum(group) > 1)}: {', '.join(each)}"
    yield _compared(found)
    for count, group in zip(found.costs.groups, found.costs.blocks, strict=True):
        each = (f"{name} {one.beyond / MIB:.0f}" for name, one in zip(NAMES, group, strict=True))
        whose = f"Each of {count} blocks" if count > 1 else "The block"
        yield f"{whose} holds, in MiB: {', '.join(each)}"


def _compared(found: Solved) -> str:
    if found.uniform is None:
        return "  no uniform recipe of this training is sure to fit"
    name, gain = f"the best uniform recipe, {found.uniform.label}", found.gain
    if gain is None:
        return f"  {name}, fits"
    pair = " against ".join(f"{1e3 * one.seconds.total:.0f}" for one in (found.best, found.uniform))
    told = f"{100 * gain:.1f} % faster than" if gain > EQUAL else "not faster than"
    return f"  {told} {name}: {pair} ms a step"
