"""``./run.sh export``: a recipe as files, lines and options for a trainer of one's own."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.commands.console import OK, make_console, slug
from harness.commands.planning.export_table import print_export
from harness.commands.planning.plan.asked import Asked, asked_for
from harness.commands.planning.plan.question import add_question, words
from harness.export import trainers
from harness.export.asked import without_counterpart
from harness.export.bundle import bundle, write
from harness.predict import attention, pool, verdict
from harness.predict.verdict import Fit
from harness.resolve import Resolved, resolve
from harness.spec import Spec, SpecError
from harness.spec import add_arguments as add_settings
from strategies.workloads import TRAIN

__all__ = ["add_arguments", "export"]

SETTINGS = ("learning_rate", "weight_decay", "beta2", "grad_clip", "ema")
"""Fields of a spec that an export may be given; all others are a plan's."""
AS_PLANNED = {"workload": TRAIN, "sampler_steps": 0, "cfg_scale": 0.0, "suite": None, "jobs": None}
AS_PLANNED |= dict.fromkeys(("largest", "check", "advise", "explain"))
"""Options of a plan that an export leaves as they are."""
COLUMNS = 80
"""Of what is printed where there is no terminal to ask."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``export``."""
    add = parser.add_argument
    add("recipes", nargs=1, metavar="RECIPE", help="strategies joined by +")
    add("--out", type=Path, metavar="DIR", help="folder (default: results/export/RECIPE)")
    add_question(parser)
    parser.set_defaults(**AS_PLANNED)
    some = ", ".join(trainers.known())
    told = f"those whose options are told (default: all): {some}"
    add("--trainers", nargs="*", metavar="T", default=trainers.known(), help=told)
    left = tuple(f.name for f in dataclasses.fields(Spec) if f.name not in SETTINGS)
    add_settings(parser.add_argument_group("the training's numbers"), leave_out=left)


def export(options: argparse.Namespace, given: Mapping[str, Any]) -> int:
    """Write the files, say what they are; the exit code.

    Raises:
        BadInput: the recipe cannot be, as a plan says it; or the folder cannot be written.
    """
    asked, resolved = _resolved(options, given)
    for name in options.trainers:
        trainers.table(name)  # a name that there is none of, before anything else is done
    folder = Path(options.out or ROOT / "results" / "export" / slug(options.recipes[0])).absolute()
    machines = -(-resolved.spec.processes // asked.gpu.node)
    made = bundle(resolved, folder, options.trainers, _plan(resolved, asked), machines)
    try:
        write(made)
    except OSError as error:
        raise SpecError(f"out is {folder}: {error.strerror}; give another --out DIR") from None
    print_export(made, None if options.cpu else _known(resolved, asked), make_console(COLUMNS))
    return OK


def _resolved(options: argparse.Namespace, given: Mapping[str, Any]) -> tuple[Asked, Resolved]:
    """The recipe as a plan has it, with the numbers that were given; what a plan refuses is."""
    asked, (recipe,) = asked_for(options), options.recipes
    settings = {name: given[name] for name in SETTINGS if name in given}
    resolved = resolve(dataclasses.replace(asked.resolved[0].spec, **settings))
    lack = verdict.lack_of(resolved, asked.gpu)
    if resolved.refusal or lack:
        raise SpecError(f"{recipe}: {resolved.refusal or lack}")
    if why := without_counterpart(resolved):
        raise SpecError(why)
    return asked, resolved


def _plan(resolved: Resolved, asked: Asked) -> str:
    """The command that plans what was exported; empty if no plan can be asked for it."""
    if resolved.spec != asked.resolved[0].spec:
        return ""
    recipe = str(resolved.recipe)
    return shlex.join(["./run.sh", "plan", "--recipes", recipe, *words(resolved, asked.gpu)])


def _known(resolved: Resolved, asked: Asked) -> Fit:
    """The card, and what an earlier plan predicted for it, if it was made."""
    kind = attention.preferred(asked.gpu.capability)
    kept = pool.cached(resolved, pool.default_folder(), kind)
    if kept is None:
        return verdict.cannot(resolved, asked.gpu, "")
    return verdict.judge(resolved, kept, asked.gpu)
