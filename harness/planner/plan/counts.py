"""``plan --gpus A B C``: the plan's answer on each number of GPUs, a row each.
Each row is the plan of that number alone, at its own global batch unless one is given."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from harness.commands.console import FAILED, OK
from harness.commands.options import write_answer
from harness.commands.progress import Predictions
from harness.planner import verdict
from harness.planner.before_step import Before
from harness.planner.plan.answer import kind_of_sample, rate
from harness.planner.plan.candidates import PlanError, asked_for
from harness.planner.plan.request import fit_as_json
from harness.planner.plan.table import SPEED, columns, of_fit, print_lines, print_rows, setting
from harness.planner.plan.tracing import Asking
from harness.planner.verdict import Fit
from harness.report.data.grid import Column
from strategies.base import BadInput
from strategies.workloads import TRAIN

ALONE = {"source": None, "workload": TRAIN, "largest": None, "nodes": None, "measured": None}
ALONE |= dict.fromkeys(("check", "advise", "explain"), False)
"""Options of a plan that several numbers of GPUs do not take -> their defaults."""
PER_GPU = {"image": "Img/s a GPU", "video": "GPU s/video"}
NOTE = (
    "Nothing above eight GPUs was ever compared with a measurement. Later starts of large "
    "collectives, slow ranks and shared links are not predicted: steps on many nodes take longer."
)


class Row(NamedTuple):
    """The answer on ``count`` GPUs, or why there is none; ``before``: what comes before a step."""

    count: int
    fit: Fit | None
    reason: str = ""
    before: Before | None = None


def plan_counts(options: argparse.Namespace, jobs: int, console: Console) -> int:
    """Plan each number of GPUs, print a row each, and return the exit code."""
    for name, usual in ALONE.items():
        if vars(options)[name] != usual:
            word = {"source": "from"}.get(name, name)
            raise PlanError(f"--{word} plans one number of GPUs; give --gpus one number")
    rows = [row for count in options.counts for row in _answers(options, count, jobs, console)]
    known = [row for row in rows if row.fit and row.fit.need_bytes is not None]
    if known:
        before = known[-1].before
        print_lines([setting([known[-1].fit]), *(before.lines if before else ())], console)
        first = known[0].fit
        own = [
            Column("GPUs", lambda row: str(row.count), "count"),
            Column("Batch", lambda row: str(row.fit.resolved.spec.global_batch), "count"),
            *of_fit(columns(["Recipe", "", "Needs", "Step ms", SPEED], first)),
            Column(
                PER_GPU[kind_of_sample(first)],
                lambda row: rate(row.fit, row.count) if row.fit.seconds else "-",
                "number",
            ),
        ]
        print_rows(own, known, console)
    for row in rows:
        if row.reason:
            console.print(escape(f"{row.count} GPUs: {row.reason}"), highlight=False)
    console.print(NOTE, style="dim")
    if options.json:
        told = [{"gpus": r.count, "refused": r.reason} | (fit_as_json(r.fit) if r.fit else {})
                for r in rows]  # fmt: skip
        write_answer(options, {"rows": told})
    return OK if known else FAILED


def _answers(options: argparse.Namespace, count: int, jobs: int, console: Console) -> Iterator[Row]:
    """Yield the answer of each training on ``count`` GPUs."""
    try:
        asked = asked_for(argparse.Namespace(**{**vars(options), "processes": count}))
    except BadInput as error:
        yield Row(count, None, str(error))
        return
    fits, proofs, _ = Asking(asked, jobs, Predictions(console)).answer(others=False)
    best = [proof.best or proof.nearest for proof in proofs]
    best = best or [verdict.fastest(fits) or verdict.nearest(fits)]
    for fit in best:
        none = "" if fit else "none of its recipes is predicted"
        yield Row(count, fit, none, asked.before)
