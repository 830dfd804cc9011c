"""Evidence of a pipeline: the parameters of each stage, its schedule, and what a watched step
sends."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from strategies.base import demand
from strategies.engines.pipeline.stage import Staged
from strategies.evidence.rules import together

if TYPE_CHECKING:
    from strategies.engine import TrainingRun


def evidence(trained: TrainingRun) -> dict[str, Any]:
    """Return facts of all stages; every rank takes part.

    Raises:
        NotInForce: a fact differs from what the recipe asks for.
    """
    looks = [_held, _scheduled, _sent, _averaged]
    return together(trained, *((lambda look=look: look(trained)) for look in looks))


def _held(trained: TrainingRun) -> dict[str, Any]:
    """Check that each parameter is on one stage, and is stepped there, and that each run has its
    blocks."""
    model, engine = trained.model, trained.engine
    demand(isinstance(model, Staged), f"the model is a {type(model).__name__}, expected a stage")
    mine = {name: p.numel() for name, p in trained.module.named_parameters()}
    free = {id(p) for p in trained.module.parameters() if p.requires_grad}
    stepped = {id(p) for group in trained.inner_optimizer.param_groups for p in group["params"]}
    each = model.ranks.everyone((mine, sorted(model.cut.blocks)))
    odd = len(free ^ stepped)
    demand(not odd, f"{odd} parameters are only in the stage or only in its optimizer")
    holders = Counter(name for held, _ in each for name in held)
    twice = sorted(name for name, times in holders.items() if times > 1)
    demand(not twice, f"{len(twice)} parameters are on several stages, {twice[:1]} first")
    elements = [sum(held.values()) for held, _ in each]
    total, wanted = sum(elements), trained.subject.parameters
    demand(total == wanted, f"all stages hold {total} elements, expected {wanted}")
    stages, runs = engine.stages, engine.stages * engine.stage_runs
    found, dealt = [runs for _, runs in each], [[*range(n, runs, stages)] for n in range(stages)]
    demand(found == dealt, f"the runs of stages are {found}, expected {dealt}")
    return {"elements_of_stages": elements}


def _scheduled(trained: TrainingRun) -> dict[str, Any]:
    kind, wanted = type(trained.model.schedule).__name__, trained.engine.schedule.kind
    demand(kind == wanted, f"the schedule is {kind}, expected {wanted}")
    return {"schedule": kind}


def _sent(trained: TrainingRun) -> dict[str, Any]:
    """Check the bytes sent to other stages: activations of each micro-batch and their gradients, at
    each border of this stage's runs."""
    if trained.observed is None or not trained.observed.ran:
        return {}
    cut, rooms = trained.model.cut, trained.model.rooms
    borders = sum((n in cut.blocks) + (n + 1 in cut.blocks) for n in range(cut.runs - 1))
    times = borders * trained.engine.micro
    wanted = times * sum(t.numel() * t.element_size() for t in rooms)
    found = sum(s.bytes for s in trained.observed.sent if s.collective == "send")
    demand(found == wanted, f"{found} bytes were sent to stages, expected {wanted}")
    return {"sent_to_stages_bytes": found}


def _averaged(trained: TrainingRun) -> dict[str, Any]:
    """Check that the replicas of a stage, which saw other samples, are equal."""
    ranks = trained.model.ranks
    if ranks.data == 1:
        return {}
    sums = torch.stack([p.detach().double().sum() for p in trained.module.parameters()])
    each = [torch.empty_like(sums) for _ in range(ranks.data)]
    dist.all_gather(each, sums, group=ranks.replicas)
    spread = max(float((other - sums).abs().max()) for other in each)
    demand(spread == 0.0, f"weights of a stage's replicas differ by {spread:.3g}")
    return {"replica_spread": spread}
