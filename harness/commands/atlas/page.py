"""The atlas as one HTML page that opens from disk and filters: its cells as JSON, and a script
that shows those that are chosen. No torch."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from pathlib import Path

from harness.commands.atlas.cells import HEADS
from harness.commands.atlas.lines import FILTERS, NOTE, Lines, covered, values
from harness.commands.planning.plan.table import SHOWN

__all__ = ["CATEGORIES", "page"]

CATEGORIES = {
    "params": "weights",
    "grads": "gradients",
    "optim": "optimizer",
    "ema": "average",
    "activ": "activations",
    "other": "other",
}
"""Head of a category -> its word on the page; colours follow their order."""
assert tuple(CATEGORIES) == tuple(SHOWN)
PLAIN = ("Model", "Training", "GPUs", "Card", "Fits", "Needs GiB", "Needs +-", "Host GiB",
         "Step s", "Speed", "Too large")  # fmt: skip
NUMBERS = ("GPUs", "Needs GiB", "Needs +-", "Host GiB", "Step s", "Speed")
VERDICTS = {
    "yes": "fits",
    "tight": "tight: what there is lies within the range of the need",
    "host": "host: only the host's memory is short",
    "no": "does not fit",
    "not": "not predicted",
}
"""Class of a square of the overview -> what it means."""
STYLE, SCRIPT = (Path(__file__).with_name(f"page.{kind}") for kind in ("css", "js"))


def page(lines: Lines) -> str:
    """The text of ``atlas.html``."""
    chosen = "".join(_select(head, lines) for head in FILTERS)
    heads = "".join(f"<th>{html.escape(head)}</th>" for head in (*PLAIN, "Recipe and memory", ""))
    gpus, trainings = values(lines, "GPUs"), values(lines, "Training")
    order = f"{', '.join(gpus)} GPUs, each {', '.join(trainings)}"
    squares = {kind: f'<i class="{kind}"></i>{told}' for kind, told in VERDICTS.items()}
    colours = [f'<i class="c{i}"></i>{word}' for i, word in enumerate(CATEGORIES.values())]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Atlas</title>\n<style>\n{STYLE.read_text('utf-8')}</style></head>\n"
        f'<body><h1>What fits which card</h1>\n<p class="note">{html.escape(NOTE)}</p>\n'
        f'<p class="note">{html.escape(covered(lines))}</p>\n'
        "<noscript><p>The cells are shown by a script; atlas.csv has the same.</p></noscript>\n"
        f'<form>{chosen}<button type="reset">Show all</button><span id="count"></span></form>\n'
        "<h2>Models by cards</h2>\n"
        f'<p class="note">A square for each chosen cell ({html.escape(order)}), with its step time '
        "where there is one alone; a click chooses the model and the card.</p>\n"
        f'{_legend(squares.values())}\n<div class="scroll"><table id="overview"></table></div>\n'
        f'<h2>Cells</h2>\n{_legend(colours)}\n<table id="cells"><thead><tr>{heads}</tr></thead>'
        '<tbody id="rows"></tbody></table>\n<button id="more" hidden></button>\n'
        f'<script type="application/json" id="data">{_data(lines)}</script>\n'
        f"<script>\n{SCRIPT.read_text('utf-8')}</script>\n</body></html>\n"
    )


def _data(lines: Lines) -> str:
    """What the script reads. A "<" of a text does not end its element."""
    what = {"heads": HEADS, "plain": PLAIN, "numbers": NUMBERS, "words": CATEGORIES, "lines": lines}
    return json.dumps(what, separators=(",", ":")).replace("<", "\\u003c").replace("],[", "],\n[")


def _legend(told: Iterable[str]) -> str:
    return f'<div class="legend">{"".join(f"<span>{text}</span>" for text in told)}</div>'


def _select(head: str, lines: Lines) -> str:
    options = "".join(f"<option>{html.escape(value)}</option>" for value in values(lines, head))
    return (
        f'<label>{head}<select id="{head}"><option value="">all</option>{options}</select></label>'
    )
