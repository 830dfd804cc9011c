"""The atlas as files: CSV, Markdown, and one HTML page that opens from disk and filters."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from pathlib import Path

from harness.commands.atlas.cells import HEADS, Cell
from harness.commands.planning.plan.table import SHOWN

__all__ = ["NOTE", "write"]

NOTE = (
    "Predicted without a GPU, one sample a GPU at each model's usual size, encoders and VAE not on "
    "the GPU: the fastest of the recipes that ./run.sh plan tries, or, where none fits, the one "
    "that needs least. Too large: the first of twice, four and eight times the sample that was "
    "predicted not to fit with that recipe. Memory was checked against what public projects "
    "measured (docs/models.md: tensors within 0.5 %, what the allocator reserves up to 10 % too "
    "low where all weights are trained); times are typical figures with the uncertainty that "
    "stands beside them, and no GPU of these was measured here."
)
SHORT = ("Model", "Training", "GPUs", "Card", "Fits", "Recipe", "Needs GiB", "Step s", "Speed",
         "Too large")  # fmt: skip
FILTERS = ("Model", "Training", "GPUs", "Card", "Fits")
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
STYLE = """
:root { color-scheme: light; --line: #dde1e6; --dim: #5c6670; }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1.25rem; max-width: 82rem;
  color: #1b1f23; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } p { max-width: 62rem; margin: 0 0 1rem; }
.note { color: var(--dim); font-size: 13px; }
form { display: flex; flex-wrap: wrap; gap: .6rem 1rem; align-items: end; margin: 0 0 .8rem; }
label { display: grid; gap: .15rem; font-size: 12px; color: var(--dim); }
select, button { font: inherit; padding: .3rem .5rem; border: 1px solid var(--line);
  border-radius: 6px; background: #fff; max-width: 100%; }
#count { font-size: 13px; color: var(--dim); padding: .4rem 0; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem .9rem; font-size: 12px; margin: 0 0 .6rem; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  margin-right: .35em; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .35rem .55rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { position: sticky; top: 0; background: #fff; font-size: 12px; color: var(--dim); }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.f { font-weight: 600; } .yes .f { color: #14713a; } .tight .f { color: #8a5a00; }
.no .f { color: #a8201a; }
td:nth-child(-n+4) { white-space: nowrap; } button { cursor: pointer; }
code { font-size: 12px; overflow-wrap: anywhere; }
.bar { display: flex; height: .8em; width: 9rem; margin-top: .25em; background: #eef0f2;
  border-radius: 3px; overflow: hidden; }
.c0 { background: #3b6fb6; } .c1 { background: #c76b29; } .c2 { background: #7a57a5; }
.c3 { background: #8c8c4a; } .c4 { background: #2f8f83; } .c5 { background: #9aa3ab; }
details summary { cursor: pointer; color: #2456a6; white-space: nowrap; }
details div { margin: .35rem 0; font-size: 13px; max-width: 26rem; }
@media (max-width: 700px) {
  body { padding: .9rem; } thead { display: none; }
  form { display: grid; grid-template-columns: 1fr 1fr; }
  table, tbody { display: block; }
  tr { display: grid; grid-template-columns: 1fr 1fr; gap: .1rem .8rem; padding: .6rem 0;
    border-bottom: 1px solid var(--line); }
  tr[hidden] { display: none; }
  td { border: 0; padding: .1rem 0; } td.n { text-align: left; white-space: normal; }
  td::before { content: attr(data-head); display: block; font-size: 11px; color: var(--dim);
    font-weight: 400; }
  td.w { grid-column: 1 / -1; } .bar { width: 100%; }
}
"""
SCRIPT = """
const selects = [...document.querySelectorAll('select')];
const rows = [...document.querySelectorAll('tbody tr')];
const count = document.getElementById('count');
function filter() {
  let shown = 0;
  for (const row of rows) {
    row.hidden = selects.some(s => s.value && row.dataset[s.name] !== s.value);
    shown += !row.hidden;
  }
  count.textContent = shown + ' of ' + rows.length + ' cells';
}
selects.forEach(s => s.addEventListener('change', filter));
document.querySelector('form').addEventListener('reset', () => setTimeout(filter));
filter();
"""
PLAIN = ("Model", "Training", "GPUs", "Card", "Fits", "Needs GiB", "Step s", "Speed", "Too large")
NUMBERS = ("GPUs", "Needs GiB", "Step s", "Speed")


def write(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Write ``atlas.csv``, ``atlas.md`` and ``atlas.html`` into ``folder``; their paths."""
    lines = [cell.texts for cell in cells]
    texts = {"csv": _csv(lines), "md": _markdown(lines), "html": _html(lines)}
    for kind, text in texts.items():
        (folder / f"atlas.{kind}").write_text(text, encoding="utf-8")
    return [folder / f"atlas.{kind}" for kind in texts]


def covered(lines: Sequence[Sequence[str]]) -> str:
    """What the atlas is of, in a sentence: what is not named was left out."""
    some = any(_at(line, "Too large") for line in lines if _at(line, "Fits") != "no")
    sizes = "" if some else ", and the next size that does not fit was not sought"
    of = {head: list(dict.fromkeys(_at(line, head) for line in lines)) for head in FILTERS[:4]}
    return (
        f"{len(lines)} cells: {len(of['Model'])} models ({', '.join(of['Model'])}), on "
        f"{', '.join(of['GPUs'])} GPUs of {', '.join(of['Card'])}; what is not named was left out"
        f"{sizes}."
    )


def _at(line: Sequence[str], head: str) -> str:
    return line[HEADS.index(head)]


def _csv(lines: Sequence[Sequence[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([HEADS, *lines])
    return out.getvalue()


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    rows = [SHORT, ["---"] * len(SHORT), *([_at(line, h) for h in SHORT] for line in lines)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"# Atlas\n\n{NOTE}\n\n{covered(lines)}\n\n{table}\n"


def _html(lines: Sequence[Sequence[str]]) -> str:
    chosen = "".join(_select(head, lines) for head in FILTERS)
    heads = "".join(f"<th>{html.escape(head)}</th>" for head in (*PLAIN, "Recipe and memory", ""))
    legend = "".join(
        f'<span><i class="c{i}"></i>{word}</span>' for i, word in enumerate(CATEGORIES.values())
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Atlas</title>\n<style>{STYLE}</style></head>\n<body><h1>What fits which card</h1>"
        f'\n<p class="note">{html.escape(NOTE)}</p>\n<p class="note">{html.escape(covered(lines))}'
        f'</p>\n<form>{chosen}<button type="reset">Show all</button><span id="count"></span>'
        "</form>\n"
        f'<div class="legend">{legend}</div>\n<table><thead><tr>{heads}</tr></thead>\n<tbody>\n'
        + "\n".join(_row(line) for line in lines)
        + f"\n</tbody></table>\n<script>{SCRIPT}</script>\n</body></html>\n"
    )


def _select(head: str, lines: Sequence[Sequence[str]]) -> str:
    values = dict.fromkeys(_at(line, head) for line in lines)
    options = "".join(f"<option>{html.escape(value)}</option>" for value in values)
    return (
        f'<label>{head}<select name="{head.lower()}"><option value="">all</option>{options}'
        "</select></label>"
    )


def _row(line: Sequence[str]) -> str:
    facts = " ".join(f'data-{h.lower()}="{html.escape(_at(line, h))}"' for h in FILTERS)
    plain = "".join(_cell(head, html.escape(_at(line, head))) for head in PLAIN)
    parts = html.escape(_at(line, "Recipe")).replace("+", "+<wbr>")
    recipe = f"<code>{parts}</code>{_bar(line)}"
    look = _at(line, "Fits").partition(" ")[0]
    return (
        f'<tr class="{look}" {facts}>{plain}{_cell("Recipe and memory", recipe, "w")}'
        f"{_cell('', _details(line), 'w')}</tr>"
    )


def _cell(head: str, inner: str, kind: str = "") -> str:
    kind = kind or ("n" if head in NUMBERS else "f" if head == "Fits" else "")
    look = f' class="{kind}"' if kind else ""
    return f'<td{look} data-head="{html.escape(head)}">{inner}</td>'


def _bar(line: Sequence[str]) -> str:
    """The categories at the peak instant, as shares of the card, or of the need where that is
    more."""
    sizes = [_number(_at(line, head)) for head in CATEGORIES]
    whole = max(_number(_at(line, "Has GiB")), sum(sizes))
    parts = "".join(
        f'<span class="c{i}" style="width:{100 * size / whole:.1f}%"></span>'
        for i, size in enumerate(sizes)
        if size
    )
    return f'<div class="bar" role="img" aria-label="{_split(line)}">{parts}</div>' if parts else ""


def _number(text: str) -> float:
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def _split(line: Sequence[str]) -> str:
    told = ((word, _at(line, head)) for head, word in CATEGORIES.items())
    return ", ".join(f"{word} {size}" for word, size in told if _number(size))


def _details(line: Sequence[str]) -> str:
    """What is folded: memory by category, the rest of the row, the command."""
    told = [
        f"At the peak: {_split(line)} GiB" if _split(line) else "",
        f"Sample: {_at(line, 'Sample')}" if _at(line, "Sample") else "",
        f"Step: {_at(line, 'Step s')} +- {_at(line, '+-')} s" if _at(line, "Step s") else "",
        f"Host: {_at(line, 'Host GiB')} GiB of a node" if _at(line, "Host GiB") else "",
    ]
    said = "".join(f"<div>{html.escape(text)}</div>" for text in told if text)
    command = f"<div><code>{html.escape(_at(line, 'Command'))}</code></div>"
    return f"<details><summary>more</summary>{said}{command}</details>"
