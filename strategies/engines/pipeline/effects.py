"""What shows a pipeline in force: whose blocks a rank holds, what one watched step passed on and
how many micro batches it kept, and a forward pass that is the whole model's."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from strategies.base import demand
from strategies.engines.pipeline import joined
from strategies.engines.pipeline.schedules import idle_share
from strategies.engines.pipeline.staged import Staged
from strategies.evidence import forward
from strategies.parallel import beside_whole

if TYPE_CHECKING:
    from strategies.engine import Trained

__all__ = ["Seen", "evidence", "observe"]

LARGEST = 2 * 10**9
"""Elements of a model up to which it is put together in host memory for a comparison."""


@dataclass
class Seen:
    """What a stage ran in one step: numbers of micro batches by what was done with them, and the
    most whose activations it kept at once."""

    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    most: int = 0

    def tell(self, what: str, number: int) -> None:
        """Called before each part of a micro batch."""
        if what in ("forward", "backward"):
            getattr(self, what).append(number)
        self.most = max(self.most, len(self.forward) - len(self.backward))


@contextlib.contextmanager
def observe(trained: Trained) -> Iterator[Seen]:
    """Note what this stage runs."""
    pipe, seen = trained.model.pipe, Seen()
    before = pipe.tell

    def tell(what: str, number: int) -> None:
        before(what, number)
        seen.tell(what, number)

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
    model = trained.model
    demand(isinstance(model, Staged), f"the model is a {type(model).__name__}, not a stage")
    demand(model.cut.count == engine.stages, f"the model is cut into {model.cut.count}")
    facts = {"stages": model.cut.count, **_held(trained), **_stepped(trained)}
    kind = type(model.pipe.schedule).__name__
    demand(kind == engine.schedule.kind, f"the schedule is {kind}, not {engine.schedule.kind}")
    facts |= {"schedule": kind, **_ran(trained, engine), **_idle(trained, engine)}
    return facts | _as_the_whole(trained)


def _everyone(value: Any) -> list[Any]:
    """``value`` of every rank, in order, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _held(trained: Trained) -> dict[str, Any]:
    """Each parameter of the model is held by one stage, and each has as many blocks."""
    module, count = trained.module, trained.model.cut.count
    mine = {name: p.numel() for name, p in module.named_parameters()}
    each = _everyone(mine)
    holders = Counter(name for held in each for name in held)
    twice = sorted(name for name, times in holders.items() if times > 1)
    demand(not twice, f"{len(twice)} parameters are held by several stages, {twice[:1]}")
    total, wanted = sum(n for held in each for n in held.values()), trained.subject.parameters
    demand(total == wanted, f"all stages hold {total} elements, of {wanted}")
    blocks = _everyone(len(trained.blocks()))
    share = trained.subject.depth // count
    demand(blocks == [share] * count, f"the stages have {blocks} blocks, not {share} each")
    return {"blocks_of_stages": blocks, "elements_of_stages": [sum(h.values()) for h in each]}


def _stepped(trained: Trained) -> dict[str, Any]:
    """This rank's optimizer steps this rank's parameters, all and no others."""
    own = {id(p) for p in trained.module.parameters() if p.requires_grad}
    stepped = {id(p) for p in trained.optimized()}
    odd = len(own ^ stepped)
    demand(not odd, f"{odd} parameters are the stage's or its optimizer's, and not both")
    return {}


def _ran(trained: Trained, engine: Any) -> dict[str, Any]:
    """What the watched step showed: each micro batch once forward and once backward, as many kept
    at once as the schedule keeps, and what passed between stages."""
    if trained.observed is None:
        return {}
    cut, seen = trained.model.cut, trained.observed.engine
    wanted = [*range(engine.micro)]
    for what in ("forward", "backward"):
        found = sorted(getattr(seen, what))
        demand(found == wanted, f"micro batches {found} ran {what}, not {wanted}")
    most = engine.schedule.in_flight(cut.index, cut.count, engine.micro)
    demand(seen.most == most, f"{seen.most} micro batches were kept at once, not {most}")
    facts = {"micro_batches": len(wanted), "in_flight_of_stages": _everyone(seen.most)}
    return facts | (_passed(trained, engine) if trained.observed.ran else {})


def _passed(trained: Trained, engine: Any) -> dict[str, Any]:
    """Tensors sent to and received from the neighbours: what passes on, of each micro batch, and
    its gradient back."""
    cut, stage = trained.model.cut, trained.model.pipe.stage
    # The last stage's own output is its loss: what passes is what comes in.
    tensors = len(stage.submod.passes)
    neighbours = (not cut.first) + (not cut.last)
    wanted = neighbours * tensors * engine.micro
    counts = Counter(ran.name for ran in trained.observed.ran)
    for name in ("c10d::send", "c10d::recv_"):
        demand(counts[name] == wanted, f"{counts[name]} of {name} in a step, not {wanted}")
    sizes = [s.bytes for s in trained.observed.sent if s.collective == "send"]
    each = sum(p.numel() * p.element_size() for p in stage.submod.passes)
    demand(sum(sizes) == neighbours * each * engine.micro, f"{sum(sizes)} bytes were sent")
    return {"sends": len(sizes), "sent_to_stages_bytes": sum(sizes)}


def _idle(trained: Trained, engine: Any) -> dict[str, Any]:
    """The share of a step that a stage waits: by the formula, and of the quickest step that this
    run took (its own clock; on a GPU what is launched is not what has run)."""
    computed = idle_share(engine.stages, engine.micro)
    facts: dict[str, Any] = {"idle_share_computed": round(computed, 4)}
    if trained.accelerator.device.type != "cpu":
        return facts
    each = _everyone(trained.model.pipe.seconds)
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
        mine = beside_whole.predicted(trained, trained.model, lambda x: x)
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
            wanted = beside_whole.predicted(trained, whole, lambda x: x)
    return {"away_from_the_whole": beside_whole.away(trained, mine, wanted)}
