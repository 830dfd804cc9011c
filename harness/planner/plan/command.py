"""The ``plan`` command: predict which recipes fit the GPUs, and how fast each trains.
It needs no GPU. This process does not import torch: each recipe is predicted in its own process."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from harness.commands.console import FAILED, INTERRUPTED, OK, make_console
from harness.commands.options import add_force, add_json, write_answer
from harness.commands.progress import Predictions
from harness.planner import pool, verdict
from harness.planner.explore import Search
from harness.planner.export import trainers
from harness.planner.plan import measured
from harness.planner.plan.advice import plan_advice, plan_largest
from harness.planner.plan.answer import check_line
from harness.planner.plan.candidates import Asked, PlanError, asked_for
from harness.planner.plan.counts import plan_counts
from harness.planner.plan.given import asked_of, plan_from, read
from harness.planner.plan.measured import Measured
from harness.planner.plan.request import add_question, fit_as_json
from harness.planner.plan.table import print_explained, print_lines, print_plan, setting
from harness.planner.plan.tracing import Asking, demand
from harness.planner.search import SOUGHT
from harness.planner.speed import rates
from harness.planner.verdict import Fit
from strategies.workloads import TRAIN, WORKLOADS

WIDE = 116
"""Columns of the table if the output is not a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plan``."""
    what, add = parser.add_mutually_exclusive_group(), parser.add_argument
    text = "recipes to compare (default: a search for the fastest; for a CPU, "
    text += "several nodes and samples, a list of recipes)"
    what.add_argument("--recipes", nargs="+", metavar="R", help=text)
    text = "read a trainer's own configuration: its command, script, TOML, YAML, JSON or env file, "
    text += "and the files beside it; predict its recipe, and what is best (default: none)"
    what.add_argument("--from", dest="source", nargs="+", type=Path, metavar="FILE", help=text)
    text = "a suite's recipes (default: as without --recipes)"
    what.add_argument("--suite", metavar="NAME_OR_FILE", help=text)
    text = "search among the recipes of these trainers alone (default: of any)"
    add("--trainer", nargs="+", metavar="NAME", choices=trainers.known(), help=text)
    add_question(parser, several=True)
    parser.set_defaults(counts=[])
    text = "train, or sample: draw samples in batches (default: train)"
    add("--workload", choices=WORKLOADS, default=TRAIN, help=text)
    text = "with sample: steps of the sampler (default: 8)"
    add("--sampler-steps", type=int, metavar="N", default=0, help=text)
    text = "with sample: guidance scale, 1: none (default: 2)"
    add("--cfg-scale", type=float, metavar="G", default=0.0, help=text)
    text = "search for the largest size that fits: micro batch, resolution, frames, rank of "
    text += "adapters, or number of blocks that stay on the GPU (default: none)"
    add("--largest", choices=SOUGHT, help=text)
    text = "print one line for one recipe; the exit code is 0 if it fits, else 1"
    add("--check", action="store_true", help=text)
    text = "change one setting of one recipe at a time, and print its memory and time"
    add("--advise", action="store_true", help=text)
    text = "with --from: another configuration, and why one needs more memory (default: none)"
    add("--diff", nargs="+", type=Path, metavar="OTHER", help=text)
    text = "texts and latents were encoded before, and the weights fit the host: judge the step "
    text += "alone (default: also what comes before it)"
    add("--cached", action="store_true", help=text)
    text = "your own step of one recipe, as 6.2s,21.5GiB: is it normal, and if not, why (default: "
    add("--measured", metavar="SECONDS,SIZE", help=text + "none)")
    add("--explain", action="store_true", help="print the tensors at each recipe's peak")
    add("--notes", action="store_true", help="print all notes below the table (default: three)")
    add("--jobs", type=int, metavar="N", help="predictions at a time (default: a core each)")
    add_json(parser)
    add_force(parser)
    text = "trace every prediction again (default: use those of earlier plans, and those that "
    add("--fresh", action="store_true", help=text + "ship with the project)")


def plan(options: argparse.Namespace) -> int:
    """Predict, print the table and the answer, and return the exit code."""
    console = make_console(WIDE)
    with pool.fresh() if options.fresh else contextlib.nullcontext():
        jobs = options.jobs or pool.default_jobs()
        own = measured.read(options.measured) if options.measured else None
        if options.counts:
            return plan_counts(options, jobs, console)
        if options.diff and not options.source:
            raise PlanError(
                "--diff compares with a configuration, and none is named; give --from FILE"
            )
        made = read(options, options.source) if options.source else None
        asked = asked_of(options, made) if made else options
        # ``--check`` prints one line to stdout, so its progress goes to stderr.
        shown = make_console(stderr=True) if options.check else console
        asking = Asking(asked_for(asked), jobs, Predictions(shown))
        if own:
            return _told(options, own, asking, console)
        uncounted = made.unpredicted if made else ()
        if options.largest or options.advise:
            before = asking.asked.before
            print_lines(before.lines if before else [], console)
            answer = plan_largest if options.largest else plan_advice
            code = answer(asked, asking, console)
            print_lines([f"Not predicted: {one}" for one in uncounted], console)
        elif made and not options.check:
            code = plan_from(options, made, asking, console)
        else:
            code = _plan(asked, asking, console, uncounted)
        asking.progress.tell_recorded()
        return code


def _told(options: argparse.Namespace, own: Measured, asking: Asking, console: Console) -> int:
    """Compare a measured step with its prediction, print the causes, and return the exit code."""
    (fit,) = asking.fits(asking.asked.resolved)
    lines = [setting([fit]), fit.label, *measured.lines(fit, own)]
    print_lines(lines, console)
    if options.json:
        found = {"measured": own._asdict(), "lines": lines, "rows": [fit_as_json(fit)]}
        write_answer(options, found)
    return FAILED if fit.need_bytes is None else OK


def _plan(
    options: argparse.Namespace,
    asking: Asking,
    console: Console,
    uncounted: Sequence[verdict.Uncounted],
) -> int:
    asked = asking.asked
    fits, proofs, tried = asking.answer()
    demand(fits, asked.resolved, asked.gpu)
    if options.check:
        fits = [verdict.with_uncounted(fit, uncounted) for fit in fits]
        line = escape(check_line(fits[0], tried, asked.before))
        console.print(line, highlight=False, soft_wrap=True)
    else:
        print_plan(fits, proofs, asked, tried, console, whole=options.notes)
    if options.explain:
        print_explained(fits, console)
    if options.json:
        write_answer(options, as_json(fits, proofs, tried, asked))
    if any(proof.stopped for proof in proofs):
        return INTERRUPTED
    none = all(fit.need_bytes is None and fit.verdict != "cannot" for fit in fits)
    short = not fits[0].fits or (asked.before is not None and not asked.before.fits)
    return FAILED if none or (options.check and short) else OK


def as_json(
    fits: Sequence[Fit], proofs: Sequence[Search], tried: Sequence[Fit] | None, asked: Asked
) -> dict[str, object]:
    """Return every derived value and the predictions behind it."""
    best = verdict.fastest([proof.best for proof in proofs if proof.best] or fits)
    return {
        "gpu": dataclasses.asdict(asked.gpu),
        "assumed": verdict.assumed(asked.gpu),
        "rests_on": rates.words(asked.gpu),
        "fastest": best.label if best else None,
        "rows": [fit_as_json(fit) for fit in fits],
        "before": asked.before.as_json if asked.before else None,
        "searches": [proof.as_json for proof in proofs],
        "tried": [fit_as_json(fit) for fit in tried or ()],
        "refused": [{"recipe": name, "reason": reason} for name, reason in asked.refused],
    }
