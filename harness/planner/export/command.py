"""The ``export`` command: a recipe as launch files, and as options of other trainers."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from harness import RESULTS, RUN, files
from harness.commands.console import OK, make_console, short, slug
from harness.commands.options import add_force, add_json, overrides, write_answer
from harness.planner import verdict
from harness.planner.export import trainers
from harness.planner.export.settled import PAGE, YAML, Bundle, bundle
from harness.planner.plan.answer import lacks, reach
from harness.planner.plan.candidates import asked_for, without_recipes
from harness.planner.plan.request import AS_PLANNED, add_question, fit_as_json, without_counterpart
from harness.planner.plan.table import wrapped
from harness.planner.plan.tracing import known
from harness.planner.verdict import Fit
from harness.resolve import Resolved, resolve
from harness.spec import Spec, SpecError
from harness.spec import add_arguments as add_settings
from harness.system.cards import Card

WHAT = {
    YAML: "accelerate's launch file",
    "deepspeed.json": "DeepSpeed's settings, without auto",
    PAGE: "options of other trainers for the same recipe",
}


def print_export(made: Bundle, fit: Fit | None, console: Console) -> None:
    """Print the files, blanks and trainers of an export.
    ``fit`` is the prediction for the card, or None without a card."""
    for line in wrapped(made.title, console.width):
        console.print(Text(line, style="bold"), soft_wrap=True)
    if fit is not None and fit.need_bytes is None:
        text = f"not predicted for {fit.gpu.words}: {RUN} plan says whether it fits"
        console.print(text, highlight=False, style="dim")
    elif fit is not None:
        word = "predicted to fit" if fit.fits else "predicted NOT to fit"
        tight = f"predicted to be tight in memory of the {fit.tight_in}, on"
        host = f", and {lacks(fit)}" if fit.verdict == "host" else ""
        text = f"{tight if fit.tight_in else word} {fit.gpu.words}: needs {reach(fit)}{host}"
        console.print(text, highlight=False, style="dim")
    files = ((name, WHAT[name]) for name in made.files)
    _part(console, f"written to {short(made.folder)}", files)
    rows = []
    for one in made.translations:
        missing = ", ".join(lack.what for lack in one.lacks)
        count = f"{len(one.options)} options" + f"; no counterpart: {missing}" * bool(missing)
        barred = "; ".join(filter(None, (one.barred, one.nearest)))
        if not one.no_model:
            rows.append((one.trainer["title"], barred if one.barred else count))
    without = ", ".join(t.trainer["title"] for t in made.translations if t.no_model)
    rows += [("no such model", without)] if without else []
    _part(console, f"other trainers in {PAGE}", rows)
    _part(console, "fill in these fields", made.blanks.items())
    _part(console, "a loop of your own sets these itself: docs/how-to/own-loop.md", made.own)
    moved = f"\nIf you move the files, change their paths in {YAML}."
    if len({name for name in made.files if name.endswith((".yaml", ".json"))}) > 1:
        console.print(moved, style="dim", highlight=False)
    console.print(Text("\nstart your own loop", style="bold"))
    console.print(Text(f"  {made.command}"), soft_wrap=True)


def _part(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print a title and a row for each entry; nothing without entries."""
    rows = list(rows)
    if rows:
        console.print(Text(f"\n{title}", style="bold"))
    width = max((len(name) for name, _ in rows), default=0)
    for name, what in rows:
        if width > console.width // 2:  # a wrapped name cannot be searched for
            console.print(Text(f"  {name}"), soft_wrap=True)
            console.print(Text(f"    {what}"))
            continue
        for at, line in enumerate(wrapped(what, console.width - width - 4)):
            head = "" if at else name
            console.print(Text(f"  {head:<{width}}  {line.strip()}"), soft_wrap=True)


SETTINGS = ("learning_rate", "weight_decay", "beta2", "grad_clip", "ema")
"""Fields of a spec that ``export`` takes as options; all others come from the plan."""
COLUMNS = 80
"""Columns of the output if it is not a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``export``."""
    add = parser.add_argument
    add("recipes", nargs=1, metavar="RECIPE", help="strategies joined by +")
    add("--out", type=Path, metavar="DIR", help="folder (default: results/export/RECIPE)")
    add_force(parser)
    add_json(parser)
    add_question(parser)
    parser.set_defaults(**AS_PLANNED)
    some = ", ".join(trainers.EXPORTED)
    text = f"trainers whose options are printed (default: all): {some}"
    add("--trainers", nargs="*", metavar="T", default=trainers.EXPORTED, help=text)
    left = tuple(f.name for f in dataclasses.fields(Spec) if f.name not in SETTINGS)
    add_settings(parser.add_argument_group("the training's numbers"), leave_out=left)


def export(options: argparse.Namespace) -> int:
    """Write the files, describe them, and return the exit code.

    Raises:
        BadInput: the recipe is impossible or cannot be exported, or the folder cannot be
            written.
    """
    asked, (recipe,), given = asked_for(options), options.recipes, overrides(options)
    settings = {name: given[name] for name in SETTINGS if name in given}
    resolved = resolve(dataclasses.replace(asked.resolved[0].spec, **settings))
    lack = verdict.lack_of(resolved, asked.gpu)
    if resolved.refusal or lack:
        raise SpecError(f"{recipe}: {resolved.refusal or lack}")
    if why := without_counterpart(resolved):
        raise SpecError(why)
    for name in options.trainers:
        trainers.exported(name)  # refuse an unknown name before other work
    folder = Path(options.out or RESULTS / "export" / slug(recipe)).absolute()
    machines = -(-resolved.spec.processes // asked.gpu.node)
    others = functools.cache(lambda: without_recipes(options, resolved).resolved)
    nearest = functools.partial(nearest_of, others, asked.gpu, resolved)
    made = bundle(resolved, folder, options.trainers, machines, nearest)
    try:
        files.write_texts(made.folder, made.files, force=options.force)
    except OSError as error:
        raise SpecError(f"out is {folder}: {error.strerror}; give another --out DIR") from None
    fit = known(resolved, asked.gpu) or verdict.cannot(resolved, asked.gpu, "")
    print_export(made, None if options.cpu else fit, make_console(COLUMNS))
    if options.json:
        write_answer(options, as_json(made, None if options.cpu else fit))
    return OK


def as_json(made: Bundle, fit: Fit | None) -> dict[str, Any]:
    """Return the export as plain data: its files by name, and each trainer's options."""
    trainers = {
        one.trainer["title"]: {"command": one.start, "options": one.options, "barred": one.barred,
                               "lacks": [lack.what for lack in one.lacks]}
        for one in made.translations
    }  # fmt: skip
    found = {"title": made.title, "folder": made.folder, "files": made.files, "trainers": trainers}
    found |= {"blanks": made.blanks, "own": dict(made.own), "start": made.command}
    return found | {"predicted": fit_as_json(fit) if fit and fit.need_bytes is not None else None}


def nearest_of(
    others: Callable[[], list[Resolved]], gpu: Card, resolved: Resolved, name: str
) -> str:
    """Return the nearest of the ``others`` that a trainer ``name`` has, which cannot express
    ``resolved``, among kept predictions."""
    rows = [row for row in others() if trainers.has(name, row)]
    fits = [fit for row in rows if (fit := known(row, gpu)) and fit.need_bytes is not None]
    if not fits:
        return f"none of its {len(rows)} recipes is predicted: ./run.sh plan --trainer {name}"
    able = [fit for fit in fits if fit.fits]
    if not able:
        return f"none of its {len(fits)} predicted recipes fits"
    own = set(map(str, resolved.recipe.strategies))

    def off(fit: Fit) -> tuple[int, float]:
        parts = set(map(str, fit.resolved.recipe.strategies))
        return len(own ^ parts), fit.seconds.total if fit.seconds else 0.0

    best = min(able, key=off)
    return f"nearest that it has and that fits: {best.label}, needs {reach(best)}"
