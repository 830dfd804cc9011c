"""``./run.sh export``: a recipe as files, lines and options for a trainer of one's own."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.commands.console import OK, make_console, slug
from harness.commands.options import add_shaping
from harness.commands.planning.export_table import print_export
from harness.commands.planning.plan.asked import Asked, asked_for
from harness.commands.planning.plan.command import add_arguments as plan_arguments
from harness.export import trainers
from harness.export.asked import without_counterpart
from harness.export.bundle import bundle, write
from harness.predict import attention, pool, verdict
from harness.predict.verdict import Fit
from harness.resolve import Resolved, resolve
from harness.spec import Spec, SpecError
from harness.spec import add_arguments as add_settings

__all__ = ["add_arguments", "export"]

SETTINGS = ("learning_rate", "weight_decay", "beta2", "grad_clip", "ema")
"""Fields of a spec that an export may be given; all others are a plan's."""
SHAPING = ("resolution", "config", "set", "frames", "text")
ANY_CARD = "24GiB"
"""What a plan is asked for where no card is meant."""
COLUMNS = 80
"""Of what is printed where there is no terminal to ask."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``export``."""
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="strategies joined by +")
    add("--out", type=Path, metavar="DIR", help="folder (default: results/export/RECIPE)")
    add("--model", default="DiT-XL/2", help="as plan takes it (default: DiT-XL/2)")
    add("--gpus", type=int, default=8, metavar="N", help="one process each (default: 8)")
    card = parser.add_mutually_exclusive_group(required=True)
    card.add_argument("--gpu", metavar="CARD", help="a card, as A100-80GB (default: none)")
    card.add_argument(
        "--gpu-memory", metavar="SIZE", help="or its memory, as 24GiB (default: none)"
    )
    card.add_argument("--cpu", action="store_true", help="or no GPU, as a trial")
    add("--global-batch", type=int, metavar="B", help="samples a step (default: 32 a GPU)")
    told = "pixels, as plan takes them (default: the public model's usual; a DiT's: 256)"
    add("--resolution", default="", metavar="PIXELS", help=told)
    add_shaping(parser)
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
    folder = Path(options.out or ROOT / "results" / "export" / slug(options.recipe)).absolute()
    made = bundle(resolved, folder, options.trainers)
    try:
        write(made)
    except OSError as error:
        raise SpecError(f"out is {folder}: {error.strerror}; give another --out DIR") from None
    print_export(made, None if options.cpu else _known(resolved, asked), make_console(COLUMNS))
    return OK


def _resolved(options: argparse.Namespace, given: Mapping[str, Any]) -> tuple[Asked, Resolved]:
    """The recipe as a plan has it, with the numbers that were given; what a plan refuses is."""
    parser = argparse.ArgumentParser()
    plan_arguments(parser)
    words = ["--recipes", options.recipe, "--model", options.model, "--gpus", str(options.gpus)]
    shaped = {name: getattr(options, name) for name in SHAPING}
    words += [word for name, value in shaped.items() if value for word in (f"--{name}", str(value))]
    words += ["--gpu", options.gpu] if options.gpu else []
    words += [] if options.gpu else ["--gpu-memory", options.gpu_memory or ANY_CARD]
    if options.global_batch is not None:
        words += ["--global-batch", str(options.global_batch)]
    asked = asked_for(parser.parse_args(words))
    settings = {name: given[name] for name in SETTINGS if name in given}
    device = "cpu" if options.cpu else "cuda"
    spec = dataclasses.replace(asked.resolved[0].spec, device=device, **settings)
    resolved = resolve(spec)
    lack = "" if options.cpu else verdict.lack_of(resolved, asked.gpu)
    if resolved.refusal or lack:
        raise SpecError(f"{options.recipe}: {resolved.refusal or lack}")
    if why := without_counterpart(resolved):
        raise SpecError(why)
    return asked, resolved


def _known(resolved: Resolved, asked: Asked) -> Fit:
    """The card, and what an earlier plan predicted for it, if it was made."""
    kind = attention.preferred(asked.gpu.capability)
    kept = pool.cached(resolved, pool.default_folder(), kind)
    if kept is None:
        return verdict.cannot(resolved, asked.gpu, "")
    return verdict.judge(resolved, kept, asked.gpu)
