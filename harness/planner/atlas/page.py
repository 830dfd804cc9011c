"""The atlas as one HTML page that opens from disk and filters its cells. No torch."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness import RUN
from harness.planner.atlas.cells import HEADS
from harness.planner.plan.table import SHOWN
from harness.planner.speed.rates import ISSUE

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
"""Words of a recipe (``cells.recipe_words``) before its categories."""


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
    squares = {kind: f'<i class="{kind}"></i>{told}' for kind, told in VERDICTS.items()}
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


def _legend(told: Iterable[str]) -> str:
    return f'<div class="legend">{"".join(f"<span>{text}</span>" for text in told)}</div>'
