"""The ``atlas`` command: every public model on every common card, for LoRA and full training.
Each cell is the answer of a plan. Predictions are cached as in a plan, so an interrupted atlas
resumes. The atlas is one HTML page that opens from disk and filters its cells. No torch."""

from __future__ import annotations

import argparse
import html
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.text import Text

from harness import RESULTS, RUN
from harness.commands.console import OK, make_console, short
from harness.commands.options import add_force
from harness.commands.progress import Predictions
from harness.json_files import atomic_file
from harness.planner import pool, records, verdict
from harness.planner.edits import adapts
from harness.planner.plan.answer import gib, rate_in_words
from harness.planner.plan.candidates import PlanError, asked_for
from harness.planner.plan.command import add_arguments as plan_arguments
from harness.planner.plan.request import export_command
from harness.planner.plan.table import SHOWN, by_category, order
from harness.planner.plan.tracing import Asking
from harness.planner.search import sample_name
from harness.planner.speed.rates import ISSUE
from harness.planner.verdict import Fit
from harness.report.figures.units import GIB
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
                lines += cells_of(words, asking)
            if len(lines) > before:
                with atomic_file(file) as stream:
                    stream.write(page(lines))
    console.print(in_short(lines), style="bold", highlight=False)
    if lines:
        console.print(Text(str(short(file))), soft_wrap=True)
    return OK


# ---- cells ----


TRAININGS = {True: "LoRA", False: "all weights"}
"""Whether some of the model's weights are frozen -> kind of training."""
HEADS = ("Model", "Training", "GPUs", "Card", "Has GiB", "Sample", "Fits", "Recipe", "Host has",
         "Speed", "Command", "Export", "Recipes")  # fmt: skip
"""Fields of a cell.
``Recipes``: the predicted recipes that are shown, as ``recipe_words``, the answer first."""
WORD = {"fits": "yes", "tight": "tight", "host": "host", "no": "no"}
MOST = 10
"""Recipes that the page shows of a cell."""


def recipe_words(fit: Fit) -> str:
    """Return a recipe's figures as words.
    First its name and the verdict by the GPU's memory alone. Then GiB of a GPU and their range, GiB
    of the host and their upper end, and seconds of a step and their range. Last GiB of each
    category of ``SHOWN`` at the peak."""
    low = min(fit.need_bytes - fit.spread_bytes, fit.least_bytes)
    on_gpu = verdict.decide(low, fit.most_bytes, fit.gpu.memory_bytes)
    most = math.ceil(10 * (fit.host_most or 0) / GIB) / 10  # never told lower than it is
    took = fit.seconds
    times = [f"{s:.2f}" for s in (took.total, took.low, took.high)] if took else ["-"] * 3
    host = ["-", "-"] if fit.host_bytes is None else [gib(fit.host_bytes), f"{most:.1f}"]
    found = [fit.label, WORD[on_gpu], gib(fit.need_bytes), gib(fit.spread_bytes), *host, *times]
    return " ".join([*found, *(gib(by_category(fit).get(head)) for head in SHOWN)])


def cells_of(words: Sequence[str], asking: Asking) -> list[list[str]]:
    """Return a cell for each training: the texts of ``HEADS``.
    It has the answer of the plan ``words``, or what needs the least. Where no recipe could be
    predicted it has the reason, or is left out if only recorded predictions count."""
    every, proofs, _ = asking.answer(others=False)
    answers = {one.adapters: one.best for one in proofs}
    plan, has = f"{RUN} plan {' '.join(words)}", gib(asking.asked.gpu.memory_bytes)
    _, model, _, gpus, _, card = words
    cells = []
    for frozen, training in TRAININGS.items():
        fits = [fit for fit in every if adapts(fit.resolved) == frozen]
        best = answers.get(frozen) or verdict.fastest(fits) or verdict.nearest(fits)
        first = [model, training, gpus, card, has]
        if best is not None:
            rivals = [fit for fit in fits if fit.need_bytes is not None and fit is not best]
            some = [best, *sorted(rivals, key=order)[: MOST - 1]]
            speed = rate_in_words(best) if best.seconds else ""
            told = [sample_name(best.resolved), WORD[best.verdict], best.label]
            told += [gib(best.host_memory), speed, f"{plan} --recipes {best.label}"]
            cells.append([*first, *told, export_command(best), "; ".join(map(recipe_words, some))])
        elif not asking.recorded:
            why = next((fit.lack or fit.prediction.reason for fit in fits), "no recipe")
            cells.append([*first, "", "not predicted", why, "", "", plan, "", ""])
    return cells


# ---- page ----


Lines = Sequence[Sequence[str]]
NOTE = (
    "Predicted without a GPU, for one sample a GPU at each model's usual size, with "
    f"encoders and VAE not on the GPU. Each cell has the answer of {RUN} plan: no usual recipe "
    "that fits is over 10 % faster. If none fits, it has the recipe that needs the least memory.",
    "A recipe fits if the upper ends of its ranges fit the GPU and the host. 64 GiB of host memory "
    "are assumed for each desktop card, and 256 GiB for each other card.",
    "Memory and times follow from traces, data sheets and typical rates; no measured rate of a "
    "card is in them. docs/explanation/accuracy.md compares predictions with measurements of "
    "public projects, and with steps on an H200. A small model on a fast "
    f"card waits for the host, which issues an operation in {1e6 * ISSUE:.0f} microseconds, and "
    "one that backward recomputes in twice that. "
    "Adapters add operations, so a LoRA may take longer there than training all weights.",
    f"{RUN} atlas --recorded makes it from the predictions that ship with the project, in three "
    "minutes.",
)
"""Paragraphs on what the numbers are, and on how they are made again."""
FILTERS = ("Model", "Training", "GPUs", "Card", "Fits")


def at(line: Sequence[str], head: str) -> str:
    """Return the text in the column ``head``."""
    return line[HEADS.index(head)]


def values(lines: Lines, head: str) -> list[str]:
    """Return the distinct texts in the column ``head``, in order; cards by their memory."""
    if head == "Card":
        lines = sorted(lines, key=lambda line: float(at(line, "Has GiB")))
    return list(dict.fromkeys(at(line, head) for line in lines))


COUNTED = {
    "yes": "fit",
    "tight": "tight",
    "host": "short of host memory",
    "no": "do not fit",
    "not": "not predicted",
}


def in_short(lines: Lines) -> str:
    """Return the number of cells of each verdict, in one sentence."""
    if not lines:
        return "0 cells: no prediction ships with the project. Leave --recorded out."
    kinds = [at(line, "Fits").split(" ")[0] for line in lines]
    counts = [f"{kinds.count(kind)} {word}" for kind, word in COUNTED.items() if kind in kinds]
    return f"{len(lines)} cells: {', '.join(counts)}."


CATEGORIES = {
    "params": "weights",
    "grads": "gradients",
    "optim": "optimizer",
    "ema": "average",
    "activ": "activations",
    "other": "other",
}
"""Head of a category -> its word on the page; colours follow this order."""
assert tuple(CATEGORIES) == tuple(SHOWN)
PLAIN = ("Model", "Training", "GPUs", "Card", "Fits", "Needs GiB", "Needs +-", "Host GiB",
         "Step s", "Speed")  # fmt: skip
NUMBERS = ("GPUs", "Needs GiB", "Needs +-", "Host GiB", "Step s", "Speed")
VERDICTS = {
    "yes": "fits",
    "tight": "tight: what there is lies within the range of the need",
    "host": "host: only the host's memory is short",
    "no": "does not fit",
    "not": "not predicted",
}
"""Class of a square in the overview -> its meaning."""
STYLE, SCRIPT = (Path(__file__).with_name(f"page.{kind}") for kind in ("css", "js"))


HOST = (
    '<label>Host memory of a machine, GiB<input id="host" type="number" min="1" step="1" '
    'inputmode="numeric" placeholder="as assumed"></label>'
)
FIGURES = ("recipe", "gpu", "need", "spread", "host", "hostMost", "step", "stepLow", "stepHigh")
"""Words of a recipe (``recipe_words``) before its categories."""


def page(lines: Lines) -> str:
    """Return the text of ``atlas.html``."""
    chosen = heads = ""
    for head in FILTERS:
        some = "".join(f"<option>{html.escape(one)}</option>" for one in values(lines, head))
        some = f'<option value="">all</option>{some}'
        chosen += f'<label>{head}<select id="{head}">{some}</select></label>'
    for text in map(html.escape, PLAIN):
        heads += f'<th data-sort="{text}"><button type="button">{text}</button></th>'
    what = {"heads": HEADS, "plain": PLAIN, "numbers": NUMBERS, "words": CATEGORIES}
    what |= {"figures": FIGURES, "verdicts": VERDICTS, "lines": lines}
    # Each "<" is escaped, so that a text cannot close the element.
    data = json.dumps(what, separators=(",", ":")).replace("<", "\\u003c").replace("],[", "],\n[")
    gpus, trainings = values(lines, "GPUs"), values(lines, "Training")
    order = f"{', '.join(gpus)} GPU{'s' * (gpus != ['1'])}, each {', '.join(trainings)}"
    squares = {kind: f'<i class="{kind}"></i>{meaning}' for kind, meaning in VERDICTS.items()}
    colours = [f'<i class="c{i}"></i>{word}' for i, word in enumerate(CATEGORIES.values())]
    notes = "\n".join(f"<p>{html.escape(text)}</p>" for text in NOTE)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Atlas</title>\n<style>\n{STYLE.read_text('utf-8')}</style></head>\n"
        "<body><h1>What fits which card</h1>\n"
        "<noscript><p>The cells are shown by a script.</p></noscript>\n"
        f'<form>{chosen}{HOST}<button type="reset">Show all</button>'
        '<span id="count"></span></form>\n'
        f'<section id="answers" aria-live="polite"></section>\n'
        "<h2>Models by cards</h2>\n"
        f'<p class="note">A square for each chosen cell ({html.escape(order)}), with its step time '
        "where there is one alone; a click chooses the model and the card.</p>\n"
        f'{_legend(squares.values())}\n<div class="scroll"><table id="overview"></table></div>\n'
        f'<h2>Cells</h2>\n<p class="note">A click on a head sorts.</p>\n{_legend(colours)}\n'
        f'<table id="cells"><thead><tr>{heads}<th>Recipe and memory</th><th></th></tr></thead>'
        '<tbody id="rows"></tbody></table>\n'
        '<button id="more" hidden></button>\n<h2>What the numbers rest on</h2>\n'
        f"{notes}\n"
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>\n{SCRIPT.read_text('utf-8').replace('./run.sh', RUN)}</script>\n</body></html>\n"
    )


def _legend(squares: Iterable[str]) -> str:
    return f'<div class="legend">{"".join(f"<span>{text}</span>" for text in squares)}</div>'
