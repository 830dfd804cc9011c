"""Plans by block, held to every plan of a small model, and to their own predictions."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest

from harness import cli
from harness.planner import verdict
from harness.planner.plan.block_costs import (
    CHOICES,
    FFN,
    HOSTED,
    NOTHING,
    RECOMPUTE,
    Costs,
    Measure,
    Plan,
)
from harness.planner.plan.solve import limits, solve
from harness.planner.verdict import Fit
from harness.prediction import Work
from harness.resolve import resolve
from harness.spec import Spec
from harness.system import cards
from tests.made.lattices import predicted
from tests.made.predictions import GIB

SMALL = Spec(
    recipe="single+bf16_pure+checkpoint", model="DiT-T/2:depth=6", data="synthetic:32",
    global_batch=64, processes=1, device="cuda", ema=0.0,
)  # fmt: skip
SEEDS = range(12)
NEEDS, STEP = 0.03, 0.001
"""How far the costs of a plan may be from its own prediction."""


def fits(costs: Costs, plan: Plan) -> bool:
    """True if the costs say so, by the upper ends of their ranges."""
    plain, hosted, host = limits(costs)
    moves = plan.swapped or any(group[c] for group in plan.counts for c in HOSTED)
    enough = costs.total(plan).host + costs.host_off <= host
    return costs.need(plan) <= (hosted if moves else plain) and enough


def every_plan(costs: Costs) -> list[Plan]:
    """Every assignment of choices to blocks; blocks of a group are alike."""
    each = [
        [tuple(map(some.count, range(len(CHOICES))))
         for some in itertools.combinations_with_replacement(range(len(CHOICES)), number)]
        for number in costs.groups
    ]  # fmt: skip
    return [Plan(counts, n) for counts in itertools.product(*each) for n in costs.swaps]


def hold_to_every_plan(costs: Costs) -> Plan | None:
    """The solved plan, which no other plan that fits beats."""
    able = [plan for plan in every_plan(costs) if fits(costs, plan) and not absent(costs, plan)]
    found = solve(costs)
    assert (found is None) == (not able)
    if found is not None:
        assert fits(costs, found) and not absent(costs, found)
        least = min(costs.seconds(plan).total for plan in able)
        assert costs.seconds(found).total == pytest.approx(least, rel=1e-6)
    return found


def absent(costs: Costs, plan: Plan) -> bool:
    both = plan.swapped and any(group[FFN] for group in plan.counts)
    return bool(both) or any(plan.counts[g][c] for g, c in costs.absent)


def made_up(seed: int) -> Costs:
    """Costs in which each choice may be the best, on a card that has too little for all to keep."""
    chance = random.Random(seed)
    row = resolve(SMALL)
    gpu = cards.of_size(3 * GIB)

    def op(phase: str, kind: str, size: float, count: float) -> dict[Work, float]:
        one = Work(phase=phase, kind=kind, dtype="float32", flops=0, bytes=int(size), count=1)
        return {one: count}

    def block(c: int) -> Measure:
        kept = chance.uniform(0.2, 0.8) * GIB
        size = (0.02, 0.0, 0.05, 0.5, 1.0)[c] * kept
        moved = {0: kept, 1: 0.05 * kept}.get(c, 0.0)
        work = op("forward", "memory", chance.uniform(0.2, 2) * GIB, 10)
        work |= op("backward", "memory", (2.0, 3.0, 3.0, 2.5, 2.0)[c] * GIB, 10)
        for phase in ("forward", "backward") if moved else ():
            work |= op(phase, "streamed", moved * chance.uniform(1, 40), 1)
        return Measure(size, size, moved, work)

    def swapped(count: int) -> Measure:
        work = {k: v for phase in ("forward", "backward")
                for k, v in op(phase, "streamed", 0.2 * GIB, count).items()}  # fmt: skip
        return Measure(0.0, -0.1 * GIB * (count - 2), 0.1 * GIB * count, work)

    groups = (3, 3)
    blocks = tuple(tuple(block(c) for c in range(len(CHOICES))) for _ in groups)
    whole = op("forward", "memory", GIB, chance.randrange(100))
    work = [dataclasses.replace(one, count=3 * count) for group in blocks
            for one, count in group[RECOMPUTE].work.items()]  # fmt: skip
    work += [dataclasses.replace(one, count=count) for one, count in whole.items()]
    anchor = verdict.judge(row, dataclasses.replace(predicted(row, 0.2), work=work), gpu)
    return Costs(
        gpu=dataclasses.replace(gpu, host_memory=int(chance.uniform(0.5, 4) * GIB)),
        anchor=anchor,
        groups=groups,
        blocks=blocks,
        beside=tuple(chance.uniform(0, 0.2) * GIB for _ in CHOICES),
        swaps={0: NOTHING, **{count: swapped(count) for count in (3, 4)}},
        off=chance.uniform(-0.3, 1.5) * GIB,
        absent=frozenset({(1, FFN)} if seed % 2 else ()),
    )


def test_no_plan_is_faster_than_the_solved_one():
    found = [hold_to_every_plan(made_up(seed)) for seed in SEEDS]
    plans = [plan for plan in found if plan]
    taken = {c for plan in plans for group in plan.counts for c, n in enumerate(group) if n}
    assert len(taken) >= 4 and any(plan.swapped for plan in plans)
    assert any(len({c for c, n in enumerate(g) if n}) > 1 for plan in plans for g in plan.counts)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--recipes single ddp", "one recipe or none, and 2"),
        ("--gpus 4", "plans one GPU"),
        ("--recipes pp:stages=2", "pp is for several"),
        ("--largest batch", "exclude each other"),
        ("--workload sample", "samples have none"),
    ],
)
def test_questions_that_it_does_not_answer_are_refused(words, said, capsys):
    line = ["plan", "--model", "DiT-S/4", "--gpu", "RTX-4090", "--solve", *words.split()]
    assert cli.main(line) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("part", ["checkpoint:part=ffn", "checkpoint:plan=r2f4"])
def test_layers_are_not_recomputed_without_their_streamed_weights(part):
    row = resolve(dataclasses.replace(SMALL, recipe=f"single+block_swap:blocks=3+{part}"))
    assert "recompute whole blocks" in str(row.refusal)


@pytest.mark.thorough
def test_costs_of_a_traced_model_agree_with_predictions_of_whole_plans(monkeypatch, tmp_path):
    seen, usual = [], Costs.corrected

    def corrected(costs: Costs, plan: Plan, fit: Fit) -> Costs:
        seen.append((costs, plan, fit))
        return usual(costs, plan, fit)

    monkeypatch.setattr(Costs, "corrected", corrected)
    file = tmp_path / "solved.json"
    words = f"plan --solve --model {SMALL.model} --gpu-memory 1.3GiB --global-batch 64"
    words += f" --recipes single+bf16_pure --json {file}"
    assert cli.main(words.split()) == 0
    traced = seen[0][0]
    hold_to_every_plan(traced)
    for _, plan, fit in seen:
        assert traced.need(plan) == pytest.approx(fit.need_bytes, rel=NEEDS), fit.label
        assert traced.seconds(plan).total == pytest.approx(fit.seconds.total, rel=STEP), fit.label
    told = json.loads(file.read_text())["solved"]
    assert told["plan"]["verdict"] == "fits" and "plan=" in told["plan"]["recipe"]
    assert told["gain"] > 0
