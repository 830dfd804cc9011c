"""``./run.sh plan --claims DIR``: the claims at the size that people train, predicted for one card.

The rows are those that the suite would run on such a GPU. What is predicted of them is kept in
DIR beside its results, and the reports there are made again with a column of verdicts on it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from harness.commands import suites
from harness.commands.console import OK
from harness.commands.planning.plan.asked import PlanError, card_of
from harness.commands.planning.plan.progress import PlanProgress
from harness.commands.reports import report
from harness.predict import attention, pool, verdict
from harness.predict.forecast import Forecast, Foretold, foretold
from harness.predict.prediction import Prediction
from harness.predict.speed import calibrated
from harness.predict.speed.cards import Card
from harness.report import read_suite
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from harness.suite import matrix
from harness.suite.file import Suite
from harness.system.probe import version

__all__ = ["plan_claims", "rows_of"]

SUITE = "claims"
FIXED = {
    "model": ("DiT-XL/2",),
    "processes": (None, 1),
    "cpu": (False,),
    "nodes": (None,),
    "network": (None,),
    "resolution": ("",),
    "config": ("",),
    "set": ("",),
    "frames": (0,),
    "text": (0,),
    "global_batch": (None,),
    "also": ([],),
    "before": ([],),
    "phases": ([],),
    "largest": (None,),
    "check": (False,),
    "advise": (False,),
    "explain": (False,),
    "scale": (None,),
    "keep": (None,),
    "json": (None,),
}
"""Options of a plan -> their values where they were left out: the suite decides."""
REPLICAS = 2
"""Cards for the rows that need more than one: the fewest that communicate."""
LIBRARIES = ("torch", "accelerate", "deepspeed")


def plan_claims(options: argparse.Namespace, console: Console) -> int:
    """Predict every row, keep the forecast in ``options.claims``, report; the exit code."""
    folder = checked(options)
    suite, card = suites.load(SUITE, "cuda"), card_of(options)
    progress = PlanProgress(console)
    kept = _foretold(rows_of(suite, card), card, options.jobs or pool.default_jobs(), progress)
    made = Forecast(
        suite=suite.name,
        model=str(suite.settings["model"]),
        gpu=card.name,
        gpu_bytes=card.memory_bytes,
        assumed=f"{verdict.assumed(card)} {calibrated.words(card)}",
        made_with={name: str(version(name)) for name in LIBRARIES} | {"code": pool.code()},
        rows=kept,
    )
    console.print(str(made.write(folder)), highlight=False, soft_wrap=True)
    report(folder)
    return OK


def checked(options: argparse.Namespace) -> Path:
    """The folder of results, if the options go with it.

    Raises:
        PlanError: what does not, and the way out.
    """
    for name, values in FIXED.items():
        if getattr(options, name) not in values:
            word = {"processes": "gpus"}.get(name, name.replace("_", "-"))
            raise PlanError(
                f"{word} is {getattr(options, name)}; --claims predicts the suite's own rows for "
                f"one card: leave --{word} out"
            )
    if options.jobs is not None and options.jobs < 1:
        raise PlanError(f"jobs is {options.jobs}; give --jobs at least 1")
    story = read_suite(options.claims).story
    if story != SUITE:
        raise PlanError(
            f"{options.claims}: its suite.json tells the story {story!r}, not {SUITE!r}; give a "
            f"folder that ./run.sh run --suite {SUITE} made (--out)"
        )
    return options.claims


def rows_of(suite: Suite, card: Card) -> list[Resolved]:
    """The suite's rows as they would run on GPUs like ``card``."""
    specs = matrix.specs(suite, {}, gpus=REPLICAS, gpu_bytes=card.memory_bytes)
    return [resolve(spec) for spec in specs]


def _foretold(
    rows: Sequence[Resolved], card: Card, jobs: int, progress: PlanProgress
) -> list[Foretold]:
    """Each row against the card; what the card cannot run is not predicted."""
    lacks = [verdict.lack_of(row, card) for row in rows]
    able = [row for row, lack in zip(rows, lacks, strict=True) if not lack]
    kind = attention.preferred(card.capability)
    progress.begin([_name(row.spec) for row in able], jobs)
    predictions: Iterator[Prediction] = iter(
        pool.predict_all(able, pool.default_folder(), kind=kind, jobs=jobs, done=progress.done)
    )
    progress.end()
    return [
        foretold(
            verdict.cannot(row, card, lack) if lack else verdict.judge(row, next(predictions), card)
        )
        for row, lack in zip(rows, lacks, strict=True)
    ]


def _name(spec: Spec) -> str:
    return f"{spec.recipe}, {spec.model}, batch {spec.global_batch}"
