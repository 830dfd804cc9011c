"""Evidence of a pipeline: the parameters and blocks of each stage, one watched step, and an output
equal to the whole model's.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from strategies.base import demand
from strategies.engines.fsdp import effects, shard
from strategies.engines.fsdp.shard import local
from strategies.engines.pipeline import state
from strategies.engines.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    WEIGHTS,
    Part,
    bubble_fraction,
    kept,
    order,
)
from strategies.engines.pipeline.stage import Staged
from strategies.evidence import reference_check, states
from strategies.evidence.rules import together

if TYPE_CHECKING:
    from strategies.engine import TrainingRun


LARGEST = 2 * 10**9
"""Largest model, in elements, that is gathered in host memory for a comparison."""


@dataclass
class Seen:
    """The parts that a stage ran in one step, in order."""

    parts: list[Part] = field(default_factory=list)


@contextlib.contextmanager
def observe(trained: TrainingRun) -> Iterator[Seen]:
    """Record the parts that this stage runs."""
    pipe, seen = trained.model.pipe, Seen()
    before = pipe.tell

    def tell(part: Part | None) -> None:
        before(part)
        if part and part != OPTIMIZER:
            seen.parts.append(part)

    pipe.tell = tell
    try:
        yield seen
    finally:
        pipe.tell = before


def evidence(trained: TrainingRun, engine: Any) -> dict[str, Any]:
    """Return facts of all stages; every rank takes part.

    Raises:
        NotInForce: a fact differs from what the recipe asks for.
    """
    ours = (_made, _held, _stepped, _ran, _in_flight, _idle)
    each = (functools.partial(look, trained, engine) for look in ours)
    whole = functools.partial(_as_the_whole, trained)
    alike = functools.partial(engine.shown_alike, trained)
    return together(trained, *each, functools.partial(_shared, trained), alike, whole)


def _made(trained: TrainingRun, engine: Any) -> dict[str, Any]:
    """Check the runs of blocks and the schedule of this stage."""
    model = trained.model
    demand(
        isinstance(model, Staged),
        f"the model is a {type(model).__name__}, expected a pipeline stage",
    )
    homes = model.cut.homes
    demand(
        homes == engine.homes,
        f"the runs of blocks are on stages {list(homes)}, expected {list(engine.homes)}",
    )
    kind = type(model.pipe.schedule).__name__
    demand(kind == engine.schedule.kind, f"the schedule is {kind}, expected {engine.schedule.kind}")
    return {"stages": model.cut.count, "schedule": kind}


def _held(trained: TrainingRun, engine: Any) -> dict[str, Any]:
    """Check that each parameter is held by one stage, or is shared by all, and that each stage has
    its blocks."""
    module, cut, everyone = trained.module, trained.model.cut, trained.model.ranks.everyone
    mine = {name: p.numel() for name, p in module.named_parameters()}
    told = everyone((mine, len(trained.blocks()), [*cut.blocks]))
    each, blocks, runs = map(list, zip(*told, strict=True))
    holders = Counter(name for held in each for name in held)
    odd = {n: times for n, times in holders.items() if times > 1 and n not in cut.shared}
    demand(not odd, f"{len(odd)} parameters are on several stages, {sorted(odd)[:1]} first")
    lost = [name for name in cut.shared if holders[name] != cut.count]
    demand(not lost, f"{len(lost)} parameters that all stages need are missing on some")
    total, wanted = sum({n: p for held in each for n, p in held.items()}.values()), trained.subject
    demand(
        total == wanted.parameters,
        f"all stages hold {total} elements, expected {wanted.parameters}",
    )
    dealt = Counter[int]()
    for run, home in enumerate(cut.homes):
        dealt[home] += len(range(*cut.bounds(run)))
    shares = [dealt[n] for n in range(cut.count)]
    demand(blocks == shares, f"the stages have {blocks} blocks, expected {shares}")
    several = {"runs_of_stages": runs} if len(cut.homes) > cut.count else {}
    elements = [sum(held.values()) for held in each]
    return {"blocks_of_stages": blocks, **several, "elements_of_stages": elements}


def _stepped(trained: TrainingRun, engine: Any) -> dict[str, Any]:
    """Check that this rank's optimizer steps all of this rank's parameters and no others."""
    trainable = [p for p in trained.module.parameters() if p.requires_grad]
    own = {id(trained.engine.part(p).tensor) for p in trainable}
    stepped = {id(p) for p in trained.optimized()}
    odd = len(own ^ stepped)
    demand(not odd, f"{odd} parameters are only in the stage or only in its optimizer")
    return {}


def _ran(trained: TrainingRun, engine: Any) -> dict[str, Any]:
    """Check the watched step: each micro-batch ran once forward and once backward in each run, in
    the schedule's order, and its tensors passed between stages."""
    if trained.observed is None:
        return {}
    cut, parts = trained.model.cut, trained.observed.engine.parts
    for run in cut.blocks:
        _each_once(engine, run, parts)
    schedule = engine.schedule
    wanted = order(schedule, engine.stages, engine.stage_runs, engine.micro)[cut.index]
    most, least = (kept(each, schedule.split) for each in (parts, wanted))
    demand(most == least, f"{most} micro-batches were in flight at once, expected {least}")
    demand(parts == wanted, f"the order was {parts[:4]}..., expected {wanted[:4]}...")
    facts = {"micro_batches": engine.micro}
    return facts | (_passed(trained, engine) if trained.observed.ran else {})


def _in_flight(trained: TrainingRun, engine: Any) -> dict[str, Any]:
    """Return the micro-batches whose activations each stage kept at once in the watched step."""
    if trained.observed is None:
        return {}
    most = kept(trained.observed.engine.parts, engine.schedule.split)
    return {"in_flight_of_stages": trained.model.ranks.everyone(most)}


def _each_once(engine: Any, run: int, parts: Sequence[Part]) -> None:
    """Check that each micro-batch ran forward and backward in a run of blocks."""
    wanted = [*range(engine.micro)]
    apart = (WEIGHTS,) if engine.schedule.split else ()
    for what in (FORWARD, BACKWARD, *apart):
        found = sorted(part.number for part in parts if part.what == what and part.run == run)
        demand(found == wanted, f"micro-batches {found} ran {what}, expected {wanted}")


def _passed(trained: TrainingRun, engine: Any) -> dict[str, Any]:
    """Check the tensors sent to and received from other stages: activations of each micro-batch and
    their gradients. Neighbouring runs of one stage send nothing."""
    cut, passes = trained.model.cut, trained.model.pipe.borders
    homes = cut.homes
    borders = [n for n in range(cut.end) if homes[n] != homes[n + 1]]
    times = {n: (n in cut.blocks) + (n + 1 in cut.blocks) for n in borders}
    wanted = sum(count * len(passes[n]) for n, count in times.items()) * engine.micro
    counts = Counter(ran.name for ran in trained.observed.ran)
    for name in ("c10d::send", "c10d::recv_"):
        demand(
            counts[name] == wanted, f"{counts[name]} calls of {name} in a step, expected {wanted}"
        )
    sizes = [s.bytes for s in trained.observed.sent if s.collective == "send"]
    bytes_ = {n: sum(p.numel() * p.element_size() for p in passes[n]) for n in borders}
    whole = sum(count * bytes_[n] for n, count in times.items()) * engine.micro
    demand(sum(sizes) == whole, f"{sum(sizes)} bytes were sent, expected {whole}")
    return {"sends": len(sizes), "sent_to_stages_bytes": sum(sizes)}


def replicas(trained: TrainingRun) -> dict[str, Any]:
    """Check that gradients were averaged once over the replicas of this stage, and that these are
    equal."""
    ranks, facts = trained.model.ranks, {}
    if ranks.data == 1:
        return {}
    mine = map(local, trained.module.parameters())  # the rows of a sharded stage
    sums = torch.stack([own.detach().double().sum() for own in mine])
    each = [torch.empty_like(sums) for _ in range(ranks.data)]
    dist.all_gather(each, sums, group=ranks.replicas)
    if trained.observed is not None and trained.observed.ran:
        among = ranks.replicas.group_name
        size = sum(s.bytes for s in trained.observed.sent if s.group == among)
        whole = sum(p.nbytes for p in trained.module.parameters() if p.requires_grad)
        demand(size == whole, f"{size} bytes of gradients were averaged, expected {whole}")
        facts["gradient_bytes_averaged"] = size
    spread = max(float((other - sums).abs().max()) for other in each)
    demand(spread == 0.0, f"weights of a stage's replicas differ by {spread:.3g}")
    return {"replicas": ranks.data, "replica_spread": spread, **facts}


def _idle(trained: TrainingRun, engine: Any) -> dict[str, Any]:
    """Return the share of a step that a stage waits: computed from its order, and on a CPU measured
    in the quickest step. A GPU's work is not over when it is launched."""
    bubble = bubble_fraction(engine.schedule, engine.stages, engine.stage_runs, engine.micro)
    facts: dict[str, Any] = {"idle_share_computed": round(float(bubble / (1 + bubble)), 4)}
    if trained.accelerator.device.type != "cpu":
        return facts
    each = trained.model.ranks.everyone(trained.model.pipe.seconds)
    steps = [list(zip(*step, strict=True)) for step in zip(*each, strict=True)]
    busy, whole = min(steps, key=lambda step: max(step[1]))
    shares = [round(1 - mine / max(whole), 4) for mine in busy]
    return (
        facts
        | {"idle_share_measured": round(sum(shares) / len(shares), 4)}
        | {"idle_share_of_stages": shares}
    )


def _as_the_whole(trained: TrainingRun) -> dict[str, Any]:
    """Compare the output of all stages with that of a whole model with their weights."""
    if trained.subject.parameters > LARGEST:
        return {}
    with torch.no_grad(), states.eager(trained):
        mine = reference_check.output_of(trained, trained.model)
        all_parameters = trained.engine.global_parameters(trained)
        whole = trained.subject.make() if trained.accelerator.is_main_process else None
        named = {} if whole is None else dict(whole.named_parameters())
        joint = state.whole(trained, list(all_parameters.values()))
        for name, p in zip(all_parameters, joint, strict=True):
            if whole is not None:
                named[name].copy_(p)
        if whole is None:
            return {}
        whole.to(trained.accelerator.device).train(trained.module.training)
        with trained.accelerator.autocast():
            wanted = reference_check.output_of(trained, whole)
    return {"away_from_the_whole": reference_check.away(trained, mine, wanted)}


@dataclass
class SeenShards(Seen):
    """The parts that a stage ran in one step, and the all-gathers of each of torch's groups by
    id."""

    gathered: Counter[int] = field(default_factory=Counter)


@contextlib.contextmanager
def observe_shards(trained: TrainingRun) -> Iterator[SeenShards]:
    """Record the parts that this stage runs and its all-gathers."""
    gathered: Counter[int] = Counter()
    original = FSDPParamGroup._to_unsharded

    def noted(group: Any) -> None:
        original(group)
        gathered[id(group)] += 1

    watch = mock.patch.object(FSDPParamGroup, "_to_unsharded", noted)
    with observe(trained) as seen, watch:
        yield SeenShards(seen.parts, gathered)


def shards(trained: TrainingRun) -> dict[str, Any]:
    """Return facts of this rank's shard and of the watched step; no collective is called.

    Raises:
        NotInForce: parameters are not sharded block by block as the recipe asks.
    """
    gathered = shard.gathered_as(trained.module)
    found: dict[str, Any] = {"sharers": trained.model.ranks.data, "gathered_as": gathered}
    for look in (effects.cut, effects.by_block, effects.shares, effects.kept):
        found |= look(trained)
    seen = trained.observed
    if seen is None or not seen.ran:
        return found
    return found | _gathered(trained, seen.engine) | _reduced(trained)


def _gathered(trained: TrainingRun, seen: SeenShards) -> dict[str, Any]:
    """Check the all-gathers of each group: one a step if weights are kept for all micro-batches,
    else one or two a micro-batch (torch may gather ahead). Weights outside of blocks are gathered
    for each run of blocks."""
    groups, runs = _groups(trained), len(trained.model.cut.blocks)
    times = [seen.gathered[id(group)] for group in groups]
    micro = trained.engine.micro
    for group, n in zip(groups, times, strict=True):
        uses = micro * (runs if trained.module in group.modules else 1)
        low, high = (uses, 2 * uses + 1) if trained.engine.reshard else (1, 1)
        demand(
            low <= n <= high,
            f"an FSDP group was gathered {n} times in a step, expected {low} to {high}",
        )
    gathers = [s for s in _sent(trained) if "gather" in s.collective]
    demand(
        len(gathers) == sum(times), f"{len(gathers)} all-gathers were sent, expected {sum(times)}"
    )
    return {"gathers_of_groups": times, "gathered_bytes": sum(s.bytes for s in gathers)}


def _reduced(trained: TrainingRun) -> dict[str, Any]:
    """Check that each group's gradients are reduce-scattered once, after the last micro-batch."""
    ours = _sent(trained)
    free = [[p for p in g.fsdp_params if p in trained.model.graded] for g in _groups(trained)]
    groups = sum(bool(own) for own in free)
    scattered = [s for s in ours if "reduce_scatter" in s.collective]
    text = f"{len(scattered)} reductions of gradients in a step of {groups} groups"
    demand(len(scattered) == groups, f"{text}, expected once each, after the last micro-batch")
    _none_lost(trained)
    sent, sharers = sum(s.bytes for s in scattered), trained.model.ranks.data
    wanted = sum(sharers * _room(p) for own in free for p in own)
    demand(sent == wanted, f"{sent} bytes of gradients were reduced, expected {wanted}")
    summed = [s.bytes for s in ours if s.collective.startswith("allreduce") and s.bytes > SCALAR]
    demand(
        not summed, f"{len(summed)} all-reduces of {sum(summed)} bytes: gradients were not sharded"
    )
    types = {s.dtype for s in scattered}
    return {
        "reductions": groups,
        "gradient_bytes_reduced": sent,
        "gradients_sent_as": "+".join(sorted(types)),
    }


def _none_lost(trained: TrainingRun) -> None:
    """Check that all trained parameters, except shared ones, had a gradient."""
    named, shared = trained.module.named_parameters(), trained.model.cut.shared
    common = {id(p) for name, p in named if name in shared}
    each = (p for group in _groups(trained) for p in group.fsdp_params)
    own = [p for p in each if p.sharded_param.requires_grad and id(p.sharded_param) not in common]
    lost = [p for p in own if p not in trained.model.graded]
    demand(not lost, f"{len(lost)} parameters of this stage had no gradient")


def _room(p: Any) -> int:
    """Return the bytes of a gradient's padded rows in the type that is sent."""
    kind = p.reduce_dtype or p.param_dtype or p.orig_dtype
    return p.padded_sharded_param_size.numel() * kind.itemsize


SCALAR = 8
"""Bytes of a norm, which the ranks of a stage sum."""


def _groups(trained: TrainingRun) -> list[Any]:
    """Return torch's groups that have weights: a middle stage has none outside of its blocks."""
    return [group for group in shard.groups(trained.module) if group.fsdp_params]


def _sent(trained: TrainingRun) -> list[Any]:
    """Return the collectives among the ranks of this stage."""
    among = trained.model.ranks.replicas.group_name
    return [s for s in trained.observed.sent if s.group == among]


# ---- weights that all stages have ----


def _shared(trained: TrainingRun) -> dict[str, Any]:
    """Check the weights that all stages have: their gradients were summed once a step, their values
    are equal on all stages, and placeholders replaced the blocks of other stages."""
    model = trained.model
    if not model.cut.shared:
        return {}
    mine = [
        trained.engine.part(p).tensor.detach().double().sum().item()
        for p in _shared_parameters(trained)
    ]
    each = model.ranks.everyone(mine)
    facts = {
        "shared_elements": sum(p.numel() for p in _shared_parameters(trained)),
        **_summed(trained),
    }
    demand(
        model.way.placeholder_calls > 0 or model.cut.index == 0,
        "no placeholder replaced the blocks of other stages",
    )
    spread = max((abs(a - b) for own in each for a, b in zip(own, each[0], strict=True)), default=0)
    demand(spread == 0.0, f"weights that all stages share differ by {spread:.3g}")
    return {**facts, "shared_spread": spread}


def _shared_parameters(trained: TrainingRun) -> list[torch.nn.Parameter]:
    named = trained.module.named_parameters()
    return [p for name, p in named if name in trained.model.cut.shared]


def _summed(trained: TrainingRun) -> dict[str, Any]:
    """Check the bytes that were summed over the stages before the optimizer's turn."""
    if trained.observed is None or not trained.observed.ran:
        return {}
    ranks = trained.model.ranks
    among = (ranks.pipe or dist.group.WORLD).group_name
    sums = (s for s in trained.observed.sent if s.collective == "allreduce_" and s.group == among)
    found, whole = sum(s.bytes for s in sums if s.phase != "optimizer"), state.shared_bytes(trained)
    demand(found == whole, f"{found} bytes of shared gradients were summed, expected {whole}")
    return {"shared_gradient_bytes": found}
