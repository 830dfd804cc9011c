"""A plan's rows for Python code: see ``harness.api``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from harness.commands.progress import Predictions
from harness.planner import pool, verdict
from harness.planner.plan.candidates import asked_for
from harness.planner.plan.command import add_arguments
from harness.planner.plan.table import order
from harness.planner.plan.tracing import Asking, demand
from harness.subjects.library.families import canonical


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A recipe predicted for a card. What was not predicted is None, and ``why`` says why.
    ``verdict`` is that of ``verdict.Fit``. ``answer``: it is what ``plan`` advises. Bytes are of
    one GPU, from ``low`` to ``high`` with the uncertainty; ``host_bytes`` are of one node."""

    recipe: str
    verdict: str
    why: str = ""
    answer: bool = False
    need_bytes: int | None = None
    need_low_bytes: int | None = None
    need_high_bytes: int | None = None
    host_bytes: int | None = None
    step_seconds: float | None = None
    samples_per_second: float | None = None


def plan(
    model: str,
    gpu: str,
    *,
    gpus: int | None = None,
    recipes: Sequence[str] = (),
    global_batch: int | None = None,
    resolution: str = "",
    host_memory: str = "",
    also: Sequence[str] = (),
) -> list[PlanRow]:
    """Predict recipes for a model and a card, the answers first; see ``plan --help``.

    Args:
        model: a public model as flux-dev, a DiT, or FILE.py:FUNCTION.
        gpu: a card as RTX-4090, or a memory as 24GiB.
        gpus: processes, one a GPU; None: 8 for a DiT, 1 for a public model.
        recipes: those to predict; none: a search for the best.
        global_batch: samples a step of all GPUs; None: the usual number.
        resolution: pixels, as 1024 or 480x832; empty: the model's usual.
        host_memory: of a machine, as 128GiB; empty: as the command assumes.
        also: other models on each GPU, as T5-XXL, 2.5GiB or usual.

    Raises:
        BadInput: the question is wrong, or its answer is not recorded and tracing lacks a package.
    """
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    memory = re.fullmatch(r"[\d.]+ *[GM]i?B", gpu)
    options = parser.parse_args([f"--gpu-memory={gpu}" if memory else f"--gpu={gpu}"])
    options.model, options.processes, options.recipes = canonical(model), gpus, [*recipes] or None
    options.global_batch, options.resolution = global_batch, resolution
    options.host_memory, options.also = host_memory, [*also]
    asked = asked_for(options)
    asking = Asking(asked, pool.default_jobs(), Predictions(Console(quiet=True)))
    fits, proofs, _ = asking.answer(others=False)
    demand(fits, asked.resolved, asked.gpu)
    best = {id(fit) for fit in ([one.best for one in proofs] or [verdict.fastest(fits)])}
    found = [
        PlanRow(
            recipe=fit.label,
            verdict=fit.verdict,
            why=fit.lack or fit.prediction.reason,
            answer=id(fit) in best,
            need_bytes=fit.need_bytes,
            need_low_bytes=fit.low_bytes,
            need_high_bytes=fit.most_bytes,
            host_bytes=fit.host_bytes,
            step_seconds=fit.seconds.total if fit.seconds else None,
            samples_per_second=fit.samples_per_second,
        )
        for fit in sorted(fits, key=lambda fit: (id(fit) not in best, *order(fit)))
    ]
    return found + [PlanRow(recipe=name, verdict="cannot", why=why) for name, why in asked.refused]
