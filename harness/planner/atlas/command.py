"""The ``atlas`` command: every public model on every common card, for LoRA and full training.

Predictions are cached as in a plan, so an interrupted atlas resumes. Its files are rewritten
after every few models.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from harness import RESULTS
from harness.commands.console import OK, make_console, short
from harness.commands.options import add_force
from harness.planner import pool, records
from harness.planner.atlas.cells import (
    AtlasProgress,
    Cell,
    Scenario,
    cells_at,
    predicted,
    shipped,
)
from harness.planner.atlas.page import from_csv, in_short, write
from harness.planner.plan.candidates import PlanError, asked_for
from harness.planner.plan.command import add_arguments as plan_arguments
from harness.subjects.library import families
from harness.subjects.names import suggestion
from harness.suite.run import check_out
from harness.system import cards

CARDS = ("12GiB", "16GiB", "RTX-3090", "RTX-4090", "RTX-5090", "L40S", "A100-40GB", "A100-80GB",
         "H100-80GB", "H200-141GB", "B200-180GB")  # fmt: skip
"""Common cards, by name or by memory."""
COUNTS = (1, 4, 8)
TOGETHER = 4
"""Models predicted in one request. At the end of a request some cores are idle."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``atlas``."""
    add = parser.add_argument
    add("--models", nargs="+", type=families.canonical, metavar="M",
        help="public models (default: all)")  # fmt: skip
    text = f"cards, or sizes as 24GiB (default: {' '.join(CARDS)})"
    add("--cards", nargs="+", metavar="CARD", default=list(CARDS), help=text)
    add("--gpus", nargs="+", type=int, metavar="N", default=list(COUNTS),
        help="numbers of GPUs (default: 1 4 8)")  # fmt: skip
    text = "only cells whose predictions all ship with the project (default: trace the others)"
    add("--recorded", action="store_true", help=text)
    text = "write the page of this atlas.csv again, without predictions (default: predict)"
    add("--from", dest="csv", type=Path, metavar="CSV", help=text)
    add("--out", type=Path, metavar="DIR", help="folder (default: results/atlas)")
    add_force(parser)
    add("--jobs", type=int, metavar="N", help="predictions at a time (default: a core each)")


def atlas(options: argparse.Namespace) -> int:
    """Predict the cells, write the files after every few models, and return the exit code.

    Raises:
        BadInput: an unknown model or card, or a file that is no atlas.csv.
        OutputError: the folder cannot be written.
    """
    console, models = make_console(), options.models or usual_models(options)
    _check(models, options.cards, options)
    lines = from_csv(options.csv) if options.csv else []
    folder = (options.out or RESULTS / "atlas").absolute()
    check_out(folder, ("atlas.*",), force=options.force)
    if lines:
        paths = write(lines, folder)
    else:
        lines, paths = _predicted(models, options, folder, AtlasProgress(console, len(models)))
    console.print(in_short(lines), style="bold", highlight=False)
    for path in paths:
        console.print(Text(str(short(path))), soft_wrap=True)
    return OK


def usual_models(options: argparse.Namespace) -> list[str]:
    """Return all public models, or with ``--recorded`` those that have records."""
    return [name for name in families.table() if not options.recorded or records.lines(name)]


def _predicted(
    models: Sequence[str], options: argparse.Namespace, folder: Path, progress: AtlasProgress
) -> tuple[list[list[str]], list[Path]]:
    """Predict all models, write the files after every few; return their lines and paths."""
    lines: list[list[str]] = []
    paths: list[Path] = []
    with pool.kept_workers():
        for first in range(0, len(models), TOGETHER):
            some = models[first : first + TOGETHER]
            progress.begin_models(some)
            found = [cell.texts for cell in cells_of(some, options, progress)]
            progress.end_models(len(found))
            lines += found
            paths = write(lines, folder) if lines or not options.recorded else []
    return lines, paths


def _check(models: Sequence[str], names: Sequence[str], options: argparse.Namespace) -> None:
    for model in models:
        if model not in families.table():
            hint = suggestion(model)
            raise PlanError(f"models has {model!r}, which is not a public model; {hint}")
    for name in names:
        cards.parse_bytes(name) if name[:1].isdigit() else cards.find(name)
    if min(options.gpus) < 1:
        raise PlanError(f"gpus is {min(options.gpus)}; give --gpus at least 1")


def cells_of(
    models: Sequence[str], options: argparse.Namespace, progress: AtlasProgress
) -> list[Cell]:
    """Return the cells of some models, by counts and cards."""
    places = [place for model in models for place in places_of(model, options)]
    if options.recorded:
        return [cell for cell in cells_at(places, shipped) if cell.complete]
    jobs = options.jobs or pool.default_jobs()
    ask = functools.partial(predicted, jobs=jobs, progress=progress)
    return cells_at(places, ask)


def places_of(model: str, options: argparse.Namespace) -> list[Scenario]:
    """Return one model on each number of each card."""
    parser = argparse.ArgumentParser()
    plan_arguments(parser)
    places = []
    for gpus, card in itertools.product(options.gpus, options.cards):
        what = "--gpu-memory" if card[:1].isdigit() else "--gpu"
        words = ["--model", model, "--gpus", str(gpus), what, card]
        places.append(Scenario(model=model, card=card, asked=asked_for(parser.parse_args(words))))
    return places
