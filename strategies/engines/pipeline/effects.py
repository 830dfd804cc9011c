"""Evidence of a pipeline: the parameters of each stage, its schedule, and what a watched step
sends."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from strategies.base import demand
from strategies.engines.pipeline.stage import Staged
from strategies.evidence.rules import copies, together

if TYPE_CHECKING:
    from strategies.engine import TrainingRun


def evidence(run: TrainingRun) -> dict[str, Any]:
    """Return facts of all stages; every rank takes part.

    Raises:
        NotInForce: a fact differs from what the recipe asks for.
    """
    return together(run, _held, _sent, _equal)


def _equal(run: TrainingRun) -> dict[str, float]:
    ranks = run.model.ranks
    return copies(run, group=ranks.replicas) if ranks.data > 1 else {}


def _held(run: TrainingRun) -> dict[str, Any]:
    """Check that each parameter is on one stage, and is stepped there, that each run has its
    blocks, and the schedule's class."""
    model, engine = run.model, run.engine
    demand(isinstance(model, Staged), f"the model is a {type(model).__name__}, expected a stage")
    mine = {name: p.numel() for name, p in run.module.named_parameters()}
    free = {id(p) for p in run.module.parameters() if p.requires_grad}
    stepped = {id(p) for group in run.inner_optimizer.param_groups for p in group["params"]}
    each = model.ranks.everyone((mine, sorted(model.cut.blocks)))
    odd = len(free ^ stepped)
    demand(not odd, f"{odd} parameters are only in the stage or only in its optimizer")
    holders = Counter(name for held, _ in each for name in held)
    twice = sorted(name for name, times in holders.items() if times > 1)
    demand(not twice, f"{len(twice)} parameters are on several stages, {twice[:1]} first")
    elements = [sum(held.values()) for held, _ in each]
    total, known = sum(elements), run.subject.parameters
    demand(total == known, f"all stages hold {total} elements, expected {known}")
    stages, runs = engine.stages, engine.stages * engine.stage_runs
    found, dealt = [runs for _, runs in each], [[*range(n, runs, stages)] for n in range(stages)]
    demand(found == dealt, f"the runs of stages are {found}, expected {dealt}")
    kind, wanted = type(model.schedule).__name__, engine.schedule.kind
    demand(kind == wanted, f"the schedule is {kind}, expected {wanted}")
    return {"elements_of_stages": elements, "schedule": kind}


def _sent(run: TrainingRun) -> dict[str, Any]:
    """Check the bytes sent to other stages: activations of each micro-batch and their gradients, at
    each border of this stage's runs."""
    if not run.observed.ran:
        return {}
    cut, rooms = run.model.cut, run.model.rooms
    borders = sum((n in cut.blocks) + (n + 1 in cut.blocks) for n in range(cut.runs - 1))
    times = borders * run.engine.micro
    wanted = times * sum(t.numel() * t.element_size() for t in rooms)
    found = sum(s.bytes for s in run.observed.sent if s.collective == "send")
    demand(found == wanted, f"{found} bytes were sent to stages, expected {wanted}")
    return {"sent_to_stages_bytes": found}
