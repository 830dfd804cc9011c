"""The ``atlas`` command: every public model on every common card, for LoRA and full training.
Each cell is the answer of a plan. Predictions are cached as in a plan, so an interrupted atlas
resumes."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from rich.text import Text

from harness import RESULTS
from harness.commands.console import OK, make_console, short
from harness.commands.options import add_force
from harness.commands.progress import Predictions
from harness.json_files import whole
from harness.planner import pool, records
from harness.planner.atlas.page import cells_of, in_short, page
from harness.planner.plan.candidates import PlanError, asked_for
from harness.planner.plan.command import add_arguments as plan_arguments
from harness.planner.plan.tracing import Asking
from harness.subjects.library import families
from harness.subjects.names import suggestion
from harness.suite.run import check_out
from harness.system import cards

CARDS = ("RTX-3060", "RTX-4060-Ti-16GB", "RTX-3090", "RTX-4090", "RTX-5090", "L40S", "A100-40GB",
         "A100-80GB", "H100-80GB", "H200-141GB", "B200-180GB")  # fmt: skip
"""Common cards. Those sold as 12 and 16 GB have 11.6 and 15.6 GiB."""
COUNTS = (1, 4, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``atlas``."""
    add = parser.add_argument
    add("--models", nargs="+", type=families.canonical, metavar="M",
        help="public models (default: all)")  # fmt: skip
    text = f"cards, or sizes as 24GiB (default: {' '.join(CARDS)})"
    add("--cards", nargs="+", metavar="CARD", default=list(CARDS), help=text)
    add("--gpus", nargs="+", type=int, metavar="N", default=list(COUNTS),
        help="numbers of GPUs (default: 1 4 8)")  # fmt: skip
    text = "only cells whose predictions ship with the project (default: trace the others)"
    add("--recorded", action="store_true", help=text)
    add("--out", type=Path, metavar="DIR", help="folder (default: results/atlas)")
    add_force(parser)
    add("--jobs", type=int, metavar="N", help="predictions at a time (default: a core each)")


def atlas(options: argparse.Namespace) -> int:
    """Predict the cells, write the page after each model, and return the exit code.

    Raises:
        BadInput: an unknown model or card.
        OutputError: the folder cannot be written.
    """
    console, models = make_console(), options.models
    if not models:  # all public ones, or those that have records
        models = [one for one in families.table() if not options.recorded or records.lines(one)]
    for model in models:
        if model not in families.table():
            hint = suggestion(model)
            raise PlanError(f"models has {model!r}, which is not a public model; {hint}")
    for name in options.cards:
        cards.parse_bytes(name) if name[:1].isdigit() else cards.find(name)
    if min(options.gpus) < 1:
        raise PlanError(f"gpus is {min(options.gpus)}; give --gpus at least 1")
    folder = (options.out or RESULTS / "atlas").absolute()
    check_out(folder, ("atlas.html",), force=options.force)
    jobs, parser = options.jobs or pool.default_jobs(), argparse.ArgumentParser()
    plan_arguments(parser)
    file, lines = folder / "atlas.html", []
    with pool.kept_workers():
        for index, model in enumerate(models, 1):
            console.print(f"[bold]{model}[/bold]  model {index} of {len(models)}")
            before = len(lines)
            for gpus, card in itertools.product(options.gpus, options.cards):
                what = "--gpu-memory" if card[:1].isdigit() else "--gpu"
                words = ["--model", model, "--gpus", str(gpus), what, card]
                asked = asked_for(parser.parse_args(words))
                asking = Asking(asked, jobs, Predictions(console), recorded=options.recorded)
                cells = cells_of(model, card, asking)
                lines += [cell.texts for cell in cells if cell.fit or not options.recorded]
            if len(lines) > before:
                with whole(file) as stream:
                    stream.write(page(lines))
    console.print(in_short(lines), style="bold", highlight=False)
    if lines:
        console.print(Text(str(short(file))), soft_wrap=True)
    return OK
