"""The atlas as files: CSV, Markdown, and one HTML page that opens from disk and filters."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from pathlib import Path

from harness.commands.atlas.cells import HEADS, Cell

__all__ = ["NOTE", "write"]

NOTE = (
    "Predicted without a GPU, one sample a GPU at each model's usual size, encoders and VAE not on "
    "the GPU: the fastest of the recipes that ./run.sh plan tries, or, where none fits, the one "
    "that needs least. Memory was checked against what public projects measured (docs/models.md: "
    "tensors within 0.5 %, what the allocator reserves up to 10 % too low where all weights are "
    "trained); times are typical figures with the uncertainty that stands beside them, and no GPU "
    "of these was measured here."
)
SHORT = ("Model", "Training", "GPUs", "Card", "Fits", "Recipe", "Needs GiB", "Step s", "Speed")
FILTERS = ("Model", "Training", "GPUs", "Card", "Fits")
STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; }
table { border-collapse: collapse; } td, th { padding: 2px 8px; border-bottom: 1px solid #ddd; }
th { text-align: left; position: sticky; top: 0; background: #fff; } select { margin: 0 1em 1em 0; }
tr.no td { color: #a33; } tr.tight td { color: #960; } td.n { text-align: right; }
code { font-size: 12px; } p { max-width: 60em; }
"""
SCRIPT = """
const selects = [...document.querySelectorAll('select')];
function filter() {
  for (const row of document.querySelectorAll('tbody tr')) {
    row.hidden = selects.some(s => s.value && row.cells[s.dataset.column].textContent !== s.value);
  }
}
selects.forEach(s => s.addEventListener('change', filter));
"""


def write(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Write ``atlas.csv``, ``atlas.md`` and ``atlas.html`` into ``folder``; their paths."""
    lines = [cell.texts for cell in cells]
    texts = {"csv": _csv(lines), "md": _markdown(lines), "html": _html(lines)}
    for kind, text in texts.items():
        (folder / f"atlas.{kind}").write_text(text, encoding="utf-8")
    return [folder / f"atlas.{kind}" for kind in texts]


def _csv(lines: Sequence[Sequence[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([HEADS, *lines])
    return out.getvalue()


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    places = [HEADS.index(head) for head in SHORT]
    rows = [SHORT, ["---"] * len(SHORT), *([line[i] for i in places] for line in lines)]
    return f"# Atlas\n\n{NOTE}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _html(lines: Sequence[Sequence[str]]) -> str:
    chosen = "".join(_select(head, lines) for head in FILTERS)
    heads = "".join(f"<th>{html.escape(head)}</th>" for head in HEADS)
    rows = "\n".join(_row(line) for line in lines)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Atlas</title>\n'
        f"<style>{STYLE}</style>\n<h1>What fits which card</h1>\n<p>{html.escape(NOTE)}</p>\n"
        f"<div>{chosen}</div>\n<table><thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>"
        f"</table>\n<script>{SCRIPT}</script>\n</html>\n"
    )


def _select(head: str, lines: Sequence[Sequence[str]]) -> str:
    column = HEADS.index(head)
    values = dict.fromkeys(line[column] for line in lines)
    options = "".join(f"<option>{html.escape(value)}</option>" for value in values)
    return (
        f'<label>{head} <select data-column="{column}"><option value="">all</option>{options}'
        "</select></label>"
    )


def _row(line: Sequence[str]) -> str:
    look = line[HEADS.index("Fits")].partition(" ")[0]
    cells = [
        f"<td{_kind(text)}>{f'<code>{html.escape(text)}</code>' if i else html.escape(text)}</td>"
        if HEADS[i] in ("Command", "Recipe")
        else f"<td{_kind(text)}>{html.escape(text)}</td>"
        for i, text in enumerate(line)
    ]
    return f'<tr class="{look}">{"".join(cells)}</tr>'


def _kind(text: str) -> str:
    return ' class="n"' if text.replace(".", "").replace("-", "").isdigit() else ""
