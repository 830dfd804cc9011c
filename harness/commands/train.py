"""``./run.sh train``: train one recipe, and write a checkpoint and samples."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from harness import RESULTS
from harness.commands import single_run
from harness.commands.console import INTERRUPTED, OK, exit_code, make_console, short, slug
from harness.commands.options import (
    ALL_GPUS,
    add_force,
    add_settings,
    check_file,
    folder_name,
    overrides,
    seconds,
)
from harness.commands.progress import Progress
from harness.launch import launch
from harness.launch.checkpoints import check_same, claims, finished, newest_whole, terms
from harness.result import Status
from harness.spec import Spec, SpecError
from harness.suite.run import Planned, check_out
from harness.system import process
from harness.system.machine import Machine
from harness.void import shown_status

DEFAULTS: dict[str, Any] = {
    "model": "DiT-T/4",
    "data": "digits",
    "objective": "flow",
    "init": "awake",
    "global_batch": 16,
    "steps": 5000,
    "warmup": 2,
    "learning_rate": 2e-3,
    "beta2": 0.99,
    "ema": 0.998,
}
"""Defaults that learn to draw digits in about ten minutes on two cores. A large model needs
--objective epsilon, --init adaln_zero, --learning-rate 1e-4 and --ema 0.9999, as the reference."""
FILES = (*launch.FILES, "checkpoint", "averaged.safetensors")
FILES_OUT = ("checkpoint", "samples", "trained", "averaged")
"""Options that name files of the worker's."""
SHOWN = 20
"""Number of first or last steps whose mean loss is shown; one step's loss is mostly noise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=folder_name, metavar="DIR", help="run folder (default: results/train/RECIPE)")
    add_force(parser)
    add("--timeout", type=seconds, metavar="SECONDS", help="deadline (default: none)")
    add(
        "--checkpoint", metavar="DIR", help="folder of the training state (default: OUT/checkpoint)"
    )
    add("--save-every", type=int, metavar="K", help="steps between two checkpoints (default: 500)")
    add("--resume", action="store_true", help="resume from the newest checkpoint")
    text = "also resume a checkpoint of another user or machine; its code may run while it loads"
    add("--trust", action="store_true", help=text)
    add("--samples", metavar="FILE.png", help="grid of samples (default: OUT/samples.png)")
    text = "file of the trained weights alone, such as adapters (default: not written)"
    add("--trained", metavar="FILE", help=text)
    text = "file of the averaged weights, for --weights (default: OUT/averaged.safetensors)"
    add("--averaged", metavar="FILE", help=text)
    add("--sample-steps", type=int, metavar="N", help="steps of the sampler (default: 25)")
    add("--guidance", type=float, metavar="G", help="classifier-free guidance scale (default: 2.0)")
    add("--dry-run", action="store_true", help="print the command, start nothing")
    add_settings(
        parser.add_argument_group("settings"), "repeat", "warmup", "profile", "snapshot",
        defaults={**DEFAULTS, "processes": ALL_GPUS},
    )  # fmt: skip


def train(options: argparse.Namespace) -> int:
    """Train, show progress, and print the paths of checkpoint and samples; return the exit code."""
    console, given = make_console(), overrides(options)
    folder = Path(options.out or RESULTS / "train" / slug(options.recipe)).absolute()
    options.checkpoint = options.checkpoint or str(folder / "checkpoint")
    if given.get("ema", DEFAULTS["ema"]):  # samples need the average
        options.samples = options.samples or str(folder / "samples.png")
        options.averaged = options.averaged or str(folder / "averaged.safetensors")
    extra = fit_words(options)

    def ask(machine: Machine) -> Spec:
        usual = single_run.usual(options.recipe, options.device, machine)
        fields = DEFAULTS | usual | given  # given values win
        if fields["steps"] <= (warmup := fields["warmup"]):
            raise SpecError(f"steps is {fields['steps']}; give --steps at least {warmup + 1}")
        # Every step of a training trains, including those that a measured run calls warm-up.
        return Spec(**fields | {"steps": fields["steps"] - warmup})

    _, row = single_run.planned(ask, folder, options.device)
    newest, skipped = newest_whole(Path(options.checkpoint)) if options.resume else (None, [])
    if newest:
        check_same(newest, terms(row.resolved))
        if row.resolved.launch.engine.unpickles and not options.trust:
            claims(newest)
        for line in skipped:
            console.print(Text(line, style="yellow"), soft_wrap=True)
        console.print(f"resumes {newest.name}", soft_wrap=True)
    if options.dry_run:
        print(launch.display(row.resolved, row.folder, extra))
        return OK
    check_out(folder, FILES, force=options.force)
    check_out(Path(options.checkpoint), ("step-*",), force=options.force)
    for name in FILES_OUT[1:]:
        if getattr(options, name):
            check_file(Path(getattr(options, name)), name, force=options.force)
    _, row = single_run.checked(ask, folder, FILES, options, console)
    return _trained(row, extra, options, console)


def fit_words(options: argparse.Namespace) -> list[str]:
    """Return the worker's own options. Paths are absolute because the worker starts in the root."""
    _check_saved(Path(options.checkpoint), options)
    words = [f"--{name}" for name in ("resume", "trust") if getattr(options, name)]
    for name in FILES_OUT:
        if getattr(options, name):
            words += [f"--{name}", os.path.abspath(getattr(options, name))]
    for name in ("save_every", "sample_steps", "guidance"):
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is not None and not 0 < value < float("inf"):
            raise SpecError(f"{name} is {value}; give {flag} above 0")
        words += [] if value is None else [flag, str(value)]
    return words


def _check_saved(folder: Path, options: argparse.Namespace) -> None:
    """Refuse a checkpoint folder that contradicts the command."""
    saved = finished(folder)
    if saved and not options.resume:
        raise SpecError(
            f"{folder} already holds a training ({saved[-1].name}); give --resume to "
            "continue it, or another --checkpoint DIR"
        )
    newest, skipped = newest_whole(folder)
    if saved and newest is None:
        why = f"{folder} has no checkpoint to resume ({'; '.join(skipped)})"
        raise SpecError(f"{why}; start in another --checkpoint DIR")
    taken = int(newest.name.removeprefix("step-")) if newest else 0
    if newest and taken >= (options.steps or DEFAULTS["steps"]):
        text = f"the training in {folder} has already taken {taken} steps"
        raise SpecError(f"{text}; give a larger --steps")


def _trained(row: Planned, extra: list[str], options: argparse.Namespace, console: Console) -> int:
    if options.resume and not finished(Path(options.checkpoint)):
        text = f"no checkpoint in {options.checkpoint}: the training starts at step 0"
        console.print(text, soft_wrap=True)
    progress, folder = Progress(console), row.folder
    try:
        result = single_run.launched(row, "train", progress, options.timeout, extra)
    except process.Interrupted:
        print(f"interrupted; --resume continues from {options.checkpoint}", file=sys.stderr)
        return INTERRUPTED
    if shown_status(result)[0] is not Status.OK and result.log_tail:
        console.print(Text(result.log_tail, style="dim"))
    if result.losses:
        first, last = ends(result.losses)
        console.print(f"loss {first:.4f} -> {last:.4f} over {len(result.losses)} steps")
    for name in FILES_OUT:
        path = getattr(options, name)
        if path and os.path.exists(path):
            console.print(Text(f"{name}: {short(Path(path))}"), soft_wrap=True)
    console.print(Text(f"log: {short(folder / 'log.txt')}"), soft_wrap=True)
    return exit_code([result])


def ends(losses: Sequence[float]) -> tuple[float, float]:
    """Return the mean losses of the first and the last steps, at most ``SHOWN`` each.

    The two ranges do not overlap: a short training would show one number twice.
    """
    count = min(SHOWN, max(1, len(losses) // 2))
    return sum(losses[:count]) / count, sum(losses[-count:]) / count
