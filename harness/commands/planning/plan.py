"""``./run.sh plan``: which recipe is predicted to fit which GPUs, how fast, and what else would.

Needs no GPU, and this process no torch: each recipe is predicted in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.commands.console import make_console
from harness.commands.options import add_shaping, check_file
from harness.commands.planning.largest_table import print_largest
from harness.commands.planning.plan_asked import CUSTOM, Asked, asked_for
from harness.commands.planning.plan_claims import plan_claims
from harness.commands.planning.plan_table import PlanProgress, print_explained, print_plan
from harness.predict import attention, pool, verdict, ways_out
from harness.predict.prediction import Prediction
from harness.predict.search import Largest, largest_batch, largest_model
from harness.predict.speed import calibrated
from harness.predict.speed.calibrated import NONE
from harness.predict.speed.roofline import sent
from harness.predict.verdict import Fit
from harness.predict.ways_out import Ways
from harness.resolve import Resolved
from harness.result import write_json
from strategies.workloads import TRAIN, WORKLOADS

__all__ = ["add_arguments", "plan"]

WIDE = 116
"""Columns of the table where there is no terminal to ask."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``plan``."""
    what, add = parser.add_mutually_exclusive_group(), parser.add_argument
    told = "recipes to choose among (default: the suite's)"
    what.add_argument("--recipes", nargs="+", metavar="R", help=told)
    told = "a suite's recipes (default: the suite default)"
    what.add_argument("--suite", metavar="NAME_OR_FILE", help=told)
    told = "the suite claims for one such card, beside the verdicts of results in DIR (default: no)"
    what.add_argument("--claims", type=Path, metavar="DIR", help=told)
    told = f"a DiT, sizes as in {CUSTOM}, a public model as flux-dev, diffusers:CLASS, or "
    add("--model", default="DiT-XL/2", help=told + "FILE.py:CLASS (default: DiT-XL/2)")
    add("--gpus", "--processes", dest="processes", type=int, metavar="N",
        help="GPUs, a process each (default: 8), or processes of the CPU (2)")  # fmt: skip
    told = "machines that they are in, alike (default: one for each 8 GPUs)"
    add("--nodes", type=int, metavar="N", help=told)
    told = "results of run --nodes on such machines: their network counts (default: typical)"
    add("--network", type=Path, metavar="DIR", help=told)
    card = parser.add_mutually_exclusive_group(required=True)
    card.add_argument("--gpu", metavar="NAME", help="a card, as A100-80GB (no default)")
    card.add_argument("--gpu-memory", metavar="SIZE", help="or its memory, as 24GiB (no default)")
    card.add_argument("--cpu", action="store_true", help="or the CPU of this machine (no default)")
    told = f"what the card was measured to do (default: the best kept; {NONE}: typical figures)"
    add("--calibration", metavar="FILE", default="", help=told)
    told = "samples a step (default: 32 a GPU of a DiT, 1 of a public model)"
    add("--global-batch", type=int, metavar="B", help=told)
    told = "pixels, as 1024 or HEIGHTxWIDTH (default: the public model's usual; a DiT's: 256)"
    add("--resolution", default="", metavar="PIXELS", help=told)
    add_shaping(parser)
    told = "largest micro batch (whatever B is), or DiT (default: neither)"
    add("--largest", choices=("batch", "model"), help=told)
    told = "train, or sample: samples drawn in batches (default: train)"
    add("--workload", choices=WORKLOADS, default=TRAIN, help=told)
    told = "with sample: steps of the sampler (default: 8)"
    add("--sampler-steps", type=int, metavar="N", default=0, help=told)
    told = "with sample: guidance scale, 1: none (default: 2)"
    add("--cfg-scale", type=float, metavar="G", default=0.0, help=told)
    add("--explain", action="store_true", help="say of each recipe what its peak is made of")
    add("--jobs", type=int, metavar="N", help="predictions at a time (default: a core each)")
    add("--json", type=Path, metavar="FILE", help="everything as JSON too (default: not written)")


def plan(options: argparse.Namespace) -> int:
    """Predict, print the table and the answer; the exit code."""
    if options.claims:
        return plan_claims(options, make_console(WIDE))
    asked, console = asked_for(options), make_console(WIDE)
    progress, jobs = PlanProgress(console), options.jobs or pool.default_jobs()
    if options.json:
        check_file(options.json, "json")
    if options.largest:
        seek = largest_batch if options.largest == "batch" else largest_model
        answers = seek(asked.resolved, asked.gpu, pool.default_folder(), jobs, progress)
        print_largest(answers, options.largest, asked, console)
        if options.json:
            write_json(options.json, largest_as_json(answers, asked))
        return 0
    ask = functools.partial(fits_of, asked=asked, jobs=jobs, progress=progress)
    fits = ask(asked.resolved)
    ways = ways_out.seek(fits, asked.processes, ask)
    print_plan(fits, asked.refused, ways, console)
    if options.explain:
        print_explained(fits, console)
    if options.json:
        write_json(options.json, as_json(fits, ways, asked))
    return 0


def fits_of(
    rows: Sequence[Resolved], why: str = "", *, asked: Asked, jobs: int, progress: PlanProgress
) -> list[Fit]:
    """Each row against the card, predicted with its progress; ``why`` says what for. What the card
    cannot run is not predicted."""
    gpu, lacks = asked.gpu, [verdict.lack_of(row, asked.gpu) for row in rows]
    able = [row for row, lack in zip(rows, lacks, strict=True) if not lack]
    predictions = iter(_predicted(able, why, asked, jobs, progress) if able else [])
    return [
        verdict.cannot(row, gpu, lack) if lack else verdict.judge(row, next(predictions), gpu)
        for row, lack in zip(rows, lacks, strict=True)
    ]


def _predicted(
    rows: Sequence[Resolved], why: str, asked: Asked, jobs: int, progress: PlanProgress
) -> list[Prediction]:
    usual = (1, asked.processes)
    ranks = [row.spec.processes for row in rows]
    where = [f" on {number} GPUs" if number not in usual else "" for number in ranks]
    progress.begin([f"{row.recipe}{on}" for row, on in zip(rows, where, strict=True)], jobs, why)
    kind, folder = attention.preferred(asked.gpu.capability), pool.default_folder()
    predictions = pool.predict_all(rows, folder, kind=kind, jobs=jobs, done=progress.done)
    progress.end()
    return predictions


def largest_as_json(answers: Sequence[Largest], asked: Asked) -> dict[str, object]:
    """Each recipe's bracket: the size that fits and the one that does not, in bytes of a GPU."""

    def side(fit: Fit | None) -> dict[str, object] | None:
        if fit is None:
            return None
        size = {"model": fit.resolved.spec.model, "micro_batch": fit.resolved.micro_batch}
        return {**size, "verdict": fit.verdict, "need_bytes": fit.need_bytes,
                "method": fit.prediction.method}  # fmt: skip

    rows = [
        {**vars(answer), "fits": side(answer.fits), "over": side(answer.over)} for answer in answers
    ]
    refused = [{"recipe": name, "reason": reason} for name, reason in asked.refused]
    given = {"gpu": dataclasses.asdict(asked.gpu), "assumed": verdict.assumed(asked.gpu)}
    return {**given, "rows": rows, "refused": refused}


def as_json(fits: Sequence[Fit], ways: Ways | None, asked: Asked) -> dict[str, object]:
    """Everything that was derived, and the predictions it was derived from."""
    best = verdict.fastest(fits)
    return {
        "gpu": dataclasses.asdict(asked.gpu),
        "assumed": verdict.assumed(asked.gpu),
        "rests_on": calibrated.words(asked.gpu),
        "fastest": best.label if best else None,
        "rows": [_fit_as_json(fit) for fit in fits],
        "tried": [_fit_as_json(fit) for fit in ways.tried] if ways else [],
        "tried_on_more_gpus": [_fit_as_json(fit) for fit in ways.wider] if ways else [],
        "refused": [{"recipe": name, "reason": reason} for name, reason in asked.refused],
    }


def _fit_as_json(fit: Fit) -> dict[str, Any]:
    return {
        "recipe": fit.label,
        "processes": fit.resolved.spec.processes,
        "global_batch": fit.resolved.spec.global_batch,
        "verdict": fit.verdict,
        "lack": fit.lack,
        "need_bytes": fit.need_bytes,
        "least_bytes": fit.least_bytes,
        "margin_bytes": fit.margin_bytes,
        "host_bytes_node": fit.host_bytes,
        "step_seconds": fit.seconds.total if fit.seconds else None,
        "step_seconds_spread": fit.seconds.spread if fit.seconds else None,
        "sent_bytes": sent(
            fit.prediction.work, fit.resolved.spec.processes, fit.gpu.node
        )._asdict(),
        "prediction": dataclasses.asdict(fit.prediction),
    }
