"""What shows a pipeline in force: whose blocks a rank holds, what one watched step passed on and
how many micro batches it kept, and a forward pass that is the whole model's."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from strategies.base import demand
from strategies.engines.fsdp.facts import local
from strategies.engines.pipeline import joined, orders, shared
from strategies.engines.pipeline.orders import Part
from strategies.engines.pipeline.staged import Staged
from strategies.evidence import forward, reference_check
from strategies.evidence.together import together

if TYPE_CHECKING:
    from strategies.engine import Trained

__all__ = ["Seen", "evidence", "observe", "replicas"]

LARGEST = 2 * 10**9
"""Elements of a model up to which it is put together in host memory for a comparison."""


@dataclass
class Seen:
    """What a stage ran in one step, in that order."""

    parts: list[Part] = field(default_factory=list)


@contextlib.contextmanager
def observe(trained: Trained) -> Iterator[Seen]:
    """Note what this stage runs."""
    pipe, seen = trained.model.pipe, Seen()
    before = pipe.tell

    def tell(part: Part | None) -> None:
        before(part)
        if part and part != orders.OPTIMIZER:
            seen.parts.append(part)

    pipe.tell = tell
    try:
        yield seen
    finally:
        pipe.tell = before


def evidence(trained: Trained, engine: Any) -> dict[str, Any]:
    """Facts of all stages; every rank takes part.

    Raises:
        NotInForce: some of it is not so.
    """
    ours = (_made, _held, _stepped, _ran, _in_flight, _idle)
    each = (functools.partial(look, trained, engine) for look in ours)
    whole = functools.partial(_as_the_whole, trained)
    alike = functools.partial(engine.shown_alike, trained)
    return together(trained, *each, functools.partial(shared.evidence, trained), alike, whole)


def _made(trained: Trained, engine: Any) -> dict[str, Any]:
    """The model is one stage, with the runs of blocks and the schedule that were asked for."""
    model = trained.model
    demand(isinstance(model, Staged), f"the model is a {type(model).__name__}, not a stage")
    homes = model.cut.homes
    demand(homes == engine.homes, f"the model's runs of blocks are on stages {list(homes)}")
    kind = type(model.pipe.schedule).__name__
    demand(kind == engine.schedule.kind, f"the schedule is {kind}, not {engine.schedule.kind}")
    return {"stages": model.cut.count, "schedule": kind}


def _held(trained: Trained, engine: Any) -> dict[str, Any]:
    """Each parameter of the model is held by one stage, or is one of those that all share, and each
    has the blocks that are dealt to it, of as many runs."""
    module, cut, everyone = trained.module, trained.model.cut, trained.model.places.everyone
    mine = {name: p.numel() for name, p in module.named_parameters()}
    told = everyone((mine, len(trained.blocks()), [*cut.blocks]))
    each, blocks, runs = map(list, zip(*told, strict=True))
    holders = Counter(name for held in each for name in held)
    odd = {n: times for n, times in holders.items() if times > 1 and n not in cut.shared}
    demand(not odd, f"{len(odd)} parameters are held by several stages, {sorted(odd)[:1]}")
    lost = [name for name in cut.shared if holders[name] != cut.count]
    demand(not lost, f"{len(lost)} parameters that all stages need are not on all")
    total, wanted = sum({n: p for held in each for n, p in held.items()}.values()), trained.subject
    demand(total == wanted.parameters, f"all stages hold {total} elements, of {wanted.parameters}")
    dealt = Counter[int]()
    for run, home in enumerate(cut.homes):
        dealt[home] += len(range(*cut.bounds(run)))
    shares = [dealt[n] for n in range(cut.count)]
    demand(blocks == shares, f"the stages have {blocks} blocks, not {shares}")
    several = {"runs_of_stages": runs} if len(cut.homes) > cut.count else {}
    elements = [sum(held.values()) for held in each]
    return {"blocks_of_stages": blocks, **several, "elements_of_stages": elements}


def _stepped(trained: Trained, engine: Any) -> dict[str, Any]:
    """This rank's optimizer steps this rank's parameters, all and no others."""
    part = trained.engine.part
    own = {id(part(p)) for p in trained.module.parameters() if p.requires_grad}
    stepped = {id(p) for p in trained.optimized()}
    odd = len(own ^ stepped)
    demand(not odd, f"{odd} parameters are the stage's or its optimizer's, and not both")
    return {}


def _ran(trained: Trained, engine: Any) -> dict[str, Any]:
    """What the watched step showed: each micro batch once forward and once backward in each run of
    blocks, in the schedule's order, and what passed between stages."""
    if trained.observed is None:
        return {}
    cut, parts = trained.model.cut, trained.observed.engine.parts
    for run in cut.blocks:
        _each_once(engine, run, parts)
    schedule = engine.schedule
    wanted = orders.order(schedule, engine.stages, engine.runs, engine.micro)[cut.index]
    most, least = (orders.kept(each, schedule.split) for each in (parts, wanted))
    demand(most == least, f"{most} micro batches were kept at once, not {least}")
    demand(parts == wanted, f"the order was {parts[:4]}..., not {wanted[:4]}...")
    facts = {"micro_batches": engine.micro}
    return facts | (_passed(trained, engine) if trained.observed.ran else {})


def _in_flight(trained: Trained, engine: Any) -> dict[str, Any]:
    """Micro batches whose activations each stage kept at once in the watched step."""
    if trained.observed is None:
        return {}
    most = orders.kept(trained.observed.engine.parts, engine.schedule.split)
    return {"in_flight_of_stages": trained.model.places.everyone(most)}


def _each_once(engine: Any, run: int, parts: Sequence[Part]) -> None:
    """Each micro batch went through a run of blocks there and back."""
    wanted = [*range(engine.micro)]
    apart = (orders.WEIGHTS,) if engine.schedule.split else ()
    for what in (orders.FORWARD, orders.BACKWARD, *apart):
        found = sorted(part.number for part in parts if part.what == what and part.run == run)
        demand(found == wanted, f"micro batches {found} ran {what}, not {wanted}")


def _passed(trained: Trained, engine: Any) -> dict[str, Any]:
    """Tensors sent to and received from the neighbours: what passes on, of each micro batch, and
    its gradient back. Runs that follow on each other in one stage send nothing."""
    cut, passes = trained.model.cut, trained.model.pipe.borders
    homes = cut.homes
    borders = [n for n in range(cut.end) if homes[n] != homes[n + 1]]
    times = {n: (n in cut.blocks) + (n + 1 in cut.blocks) for n in borders}
    wanted = sum(count * len(passes[n]) for n, count in times.items()) * engine.micro
    counts = Counter(ran.name for ran in trained.observed.ran)
    for name in ("c10d::send", "c10d::recv_"):
        demand(counts[name] == wanted, f"{counts[name]} of {name} in a step, not {wanted}")
    sizes = [s.bytes for s in trained.observed.sent if s.collective == "send"]
    bytes_ = {n: sum(p.numel() * p.element_size() for p in passes[n]) for n in borders}
    whole = sum(count * bytes_[n] for n, count in times.items()) * engine.micro
    demand(sum(sizes) == whole, f"{sum(sizes)} bytes were sent, of {whole}")
    return {"sends": len(sizes), "sent_to_stages_bytes": sum(sizes)}


def replicas(trained: Trained) -> dict[str, Any]:
    """Where each stage is there several times: gradients were averaged, all and once, and replicas
    that saw other samples are equal."""
    places, facts = trained.model.places, {}
    if places.data == 1:
        return {}
    mine = map(local, trained.module.parameters())  # of sharded stages the rows
    sums = torch.stack([own.detach().double().sum() for own in mine])
    each = [torch.empty_like(sums) for _ in range(places.data)]
    dist.all_gather(each, sums, group=places.replicas)
    if trained.observed is not None and trained.observed.ran:
        among = places.replicas.group_name
        size = sum(s.bytes for s in trained.observed.sent if s.group == among)
        whole = sum(p.nbytes for p in trained.module.parameters() if p.requires_grad)
        demand(size == whole, f"{size} bytes of gradients were averaged, of {whole}")
        facts["gradient_bytes_averaged"] = size
    spread = max(float((other - sums).abs().max()) for other in each)
    demand(spread == 0.0, f"the replicas of a stage drifted apart by {spread:.3g}")
    return {"replicas": places.data, "replica_spread": spread, **facts}


def _idle(trained: Trained, engine: Any) -> dict[str, Any]:
    """The share of a step that a stage waits: as its order has it, and of the quickest step that
    this run took (its own clock; on a GPU what is launched is not what has run)."""
    waits = engine.waits
    facts: dict[str, Any] = {"idle_share_computed": round(float(waits / (1 + waits)), 4)}
    if trained.accelerator.device.type != "cpu":
        return facts
    each = trained.model.places.everyone(trained.model.pipe.seconds)
    steps = [list(zip(*step, strict=True)) for step in zip(*each, strict=True)]
    busy, whole = min(steps, key=lambda step: max(step[1]))
    shares = [round(1 - mine / max(whole), 4) for mine in busy]
    return (
        facts
        | {"idle_share_measured": round(sum(shares) / len(shares), 4)}
        | {"idle_share_of_stages": shares}
    )


def _as_the_whole(trained: Trained) -> dict[str, Any]:
    """A prediction through all stages beside one of a whole model that has their weights."""
    if trained.subject.parameters > LARGEST:
        return {}
    with torch.no_grad(), forward.eager(trained):
        mine = reference_check.output_of(trained, trained.model)
        everywhere = trained.engine.everywhere(trained)
        whole = trained.subject.make() if trained.accelerator.is_main_process else None
        named = {} if whole is None else dict(whole.named_parameters())
        joint = joined.whole(trained, list(everywhere.values()))
        for name, p in zip(everywhere, joint, strict=True):
            if whole is not None:
                named[name].copy_(p)
        if whole is None:
            return {}
        whole.to(trained.accelerator.device).train(trained.module.training)
        with trained.accelerator.autocast():
            wanted = reference_check.output_of(trained, whole)
    return {"away_from_the_whole": reference_check.away(trained, mine, wanted)}
