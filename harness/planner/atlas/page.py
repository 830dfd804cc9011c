"""The atlas as files: CSV, Markdown, and one HTML page that opens from disk and filters its cells.

No torch.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from harness.json_files import whole
from harness.planner.atlas.cells import HEADS, TRAININGS
from harness.planner.plan.candidates import PlanError
from harness.planner.plan.table import SHOWN
from harness.planner.speed.rates import ISSUE
from strategies.files import cell, printable, read_foreign

# ---- lines of text ----


Lines = Sequence[Sequence[str]]
NOTE = (
    "Predicted without a GPU, for one sample a GPU at each model's usual size, with "
    "encoders and VAE not on the GPU. Each cell has the answer of ./run.sh plan: no usual recipe "
    "that fits is over 10 % faster. If none fits, it has the recipe that needs the least memory.",
    "A recipe fits if the upper ends of its ranges fit the GPU and the host. 64 GiB of host memory "
    "are assumed for each desktop card, and 256 GiB for each other card. Too large: "
    "the first of two, four and eight times the sample size that is predicted not to fit "
    "with that recipe.",
    "Memory and times follow from traces, data sheets and typical rates; no measured rate of a "
    "card is in them. docs/explanation/accuracy.md compares predictions with measurements of "
    "public projects, and with steps on an H200. A small model on a fast "
    f"card waits for the host, which issues an operation in {1e6 * ISSUE:.0f} microseconds, and "
    "one that backward recomputes in twice that. "
    "Adapters add operations, so a LoRA may take longer there than training all weights.",
    "The atlas in docs/atlas has the cells whose predictions are all recorded. The command "
    "./run.sh atlas --recorded --out docs/atlas makes it again in three minutes.",
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


def covered(lines: Lines) -> str:
    """Return a sentence on what the atlas covers; anything not named was left out."""
    fits = [line for line in lines if at(line, "Fits") in ("yes", "tight")]
    sought = values([line for line in fits if at(line, "Too large")], "GPUs")
    sizes = " Larger samples were not tried."
    if sought:
        some = sought != values(fits, "GPUs")
        on = f"{', '.join(sought)} GPU{'s' * (sought != ['1'])}"
        sizes = f" Larger samples were tried on {on} only." if some else ""
    models, _, gpus, cards = (values(lines, head) for head in FILTERS[:4])
    whole = len(lines) == len(TRAININGS) * len(models) * len(gpus) * len(cards)
    named = ", ".join(models) if len(models) < MANY else f"{len(models)}, named in the table"
    rest = "Nothing else was asked for." if whole else UNKEPT
    return (
        f"{len(lines)} cells. Models: {named}. GPUs: {', '.join(gpus)} of "
        f"{', '.join(cards)}. {rest}{sizes}"
    )


MANY = 20
"""Number of models from which they are not named one by one."""
UNKEPT = (
    "Other cells of these models and cards are left out: not all of their predictions are kept."
)
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
        return "0 cells: no prediction of today's code is kept. Leave --kept and --recorded out."
    kinds = [at(line, "Fits").split(" ")[0] for line in lines]
    counts = [f"{kinds.count(kind)} {word}" for kind, word in COUNTED.items() if kind in kinds]
    return f"{len(lines)} cells: {', '.join(counts)}."


def as_csv(lines: Lines) -> str:
    """Return the text of ``atlas.csv``."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([HEADS, *(map(cell, line) for line in lines)])
    return out.getvalue()


def from_csv(path: Path) -> list[list[str]]:
    """Read the lines of an ``atlas.csv``.

    Raises:
        PlanError: it cannot be read, has other columns, or has no cells.
    """
    try:
        heads, *lines = csv.reader(io.StringIO(printable(read_foreign(path))))
    except (OSError, ValueError, csv.Error) as error:
        raise PlanError(f"from is {str(path)!r}, which is no atlas.csv ({error})") from error
    if tuple(heads) != HEADS or not lines or any(len(line) != len(HEADS) for line in lines):
        raise PlanError(f"from is {str(path)!r}, which has not the columns of an atlas.csv")
    for name in values(lines, "Model"):
        if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
            raise PlanError(f"from is {str(path)!r}, whose model {name!r:.60} is no model's name")
    return lines


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
         "Step s", "Speed", "Too large")  # fmt: skip
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
    chosen = "".join(_select(head, lines) for head in FILTERS) + HOST
    heads = "".join(_head(head) for head in PLAIN) + "<th>Recipe and memory</th><th></th>"
    gpus, trainings = values(lines, "GPUs"), values(lines, "Training")
    order = f"{', '.join(gpus)} GPU{'s' * (gpus != ['1'])}, each {', '.join(trainings)}"
    squares = {kind: f'<i class="{kind}"></i>{told}' for kind, told in VERDICTS.items()}
    colours = [f'<i class="c{i}"></i>{word}' for i, word in enumerate(CATEGORIES.values())]
    notes = "\n".join(f"<p>{html.escape(text)}</p>" for text in (*NOTE, covered(lines)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Atlas</title>\n<style>\n{STYLE.read_text('utf-8')}</style></head>\n"
        "<body><h1>What fits which card</h1>\n"
        "<noscript><p>The cells are shown by a script; atlas.csv has the same.</p></noscript>\n"
        f'<form>{chosen}<button type="reset">Show all</button><span id="count"></span></form>\n'
        f'<section id="answers" aria-live="polite"></section>\n'
        "<h2>Models by cards</h2>\n"
        f'<p class="note">A square for each chosen cell ({html.escape(order)}), with its step time '
        "where there is one alone; a click chooses the model and the card.</p>\n"
        f'{_legend(squares.values())}\n<div class="scroll"><table id="overview"></table></div>\n'
        f'<h2>Cells</h2>\n<p class="note">A click on a head sorts.</p>\n{_legend(colours)}\n'
        f'<table id="cells"><thead><tr>{heads}</tr></thead><tbody id="rows"></tbody></table>\n'
        '<button id="more" hidden></button>\n<h2>What the numbers rest on</h2>\n'
        f"{notes}\n"
        f'<script type="application/json" id="data">{_data(lines)}</script>\n'
        f"<script>\n{SCRIPT.read_text('utf-8')}</script>\n</body></html>\n"
    )


def _data(lines: Lines) -> str:
    """Return the script's data; each "<" is escaped so that a text cannot close the element."""
    what = {"heads": HEADS, "plain": PLAIN, "numbers": NUMBERS, "words": CATEGORIES}
    what |= {"figures": FIGURES, "verdicts": VERDICTS, "lines": lines}
    return json.dumps(what, separators=(",", ":")).replace("<", "\\u003c").replace("],[", "],\n[")


def _head(name: str) -> str:
    text = html.escape(name)
    return f'<th data-sort="{text}"><button type="button">{text}</button></th>'


def _legend(told: Iterable[str]) -> str:
    return f'<div class="legend">{"".join(f"<span>{text}</span>" for text in told)}</div>'


def _select(head: str, lines: Lines) -> str:
    options = "".join(f"<option>{html.escape(value)}</option>" for value in values(lines, head))
    return (
        f'<label>{head}<select id="{head}"><option value="">all</option>{options}</select></label>'
    )


# ---- Markdown ----
# An overview of models by cards, and a page for each model.


FOLDER = "models"
"""Folder of the models' pages, beside the overview."""
SHORT = ("Training", "GPUs", "Card", "Fits", "Recipe", "Needs GiB", "Needs +-", "Host GiB",
         "Step s", "Speed", "Too large")  # fmt: skip
READING = (
    "Cells: seconds of a step if a recipe is predicted to fit (tight: the available "
    "memory lies within the range of the need). Otherwise: the GiB of a GPU, or of the "
    "host if only that is short, for the recipe that lacks the least. A model's page "
    "names the recipes."
)


def overview(lines: Lines) -> str:
    """Return ``README.md``: a table of models by cards for each training and number of GPUs."""
    files = "[atlas.html](atlas.html) filters them all; [atlas.csv](atlas.csv) has each number."
    return "\n\n".join(
        ["# Atlas", *NOTE, covered(lines), f"{READING} {files}", *_tables(lines)]
    ) + "\n"  # fmt: skip


def of_model(model: str, lines: Lines) -> str:
    """Return the page of one model, with a row for each cell."""
    rows = [[at(line, head) for head in SHORT] for line in lines if at(line, "Model") == model]
    return f"# {model}\n\n{_table(SHORT, rows)}\n\nHow to read it: [the atlas](../README.md).\n"


def _tables(lines: Lines) -> Iterator[str]:
    cards, gpus = values(lines, "Card"), values(lines, "GPUs")
    for training in values(lines, "Training"):
        for number in gpus:
            some = [x for x in lines if (at(x, "Training"), at(x, "GPUs")) == (training, number)]
            fields = {(at(line, "Model"), at(line, "Card")): _told(line) for line in some}
            rows = [
                [
                    f"[{model}]({FOLDER}/{model}.md)",
                    *(fields.get((model, card), "") for card in cards),
                ]
                for model in values(some, "Model")
            ]
            count = f"{number} GPU{'s' * (number != '1')}"
            yield f"## {training[0].upper()}{training[1:]}, {count}\n\n" + _table(
                ["Model", *cards], rows
            )


def _told(line: Sequence[str]) -> str:
    """Return a cell in a few characters."""
    fits = at(line, "Fits")
    if fits in ("yes", "tight"):
        return f"{at(line, 'Step s')} s" + " tight" * (fits == "tight")
    if fits == "host":
        return f"host: {at(line, 'Host GiB')} GiB"
    return f"no: {at(line, 'Needs GiB')} GiB" if fits == "no" else fits


def _table(heads: Sequence[str], rows: Lines) -> str:
    told = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in told)


# ---- files ----


NAMES = {"md": "README.md"}
"""Kind -> name, if it is not ``atlas.KIND``. A site has one page for atlas.md and atlas.html."""


def write(lines: Lines, folder: Path) -> list[Path]:
    """Write CSV, Markdown with a page for each model, and HTML; return the three paths."""
    pages = folder / FOLDER
    pages.mkdir(exist_ok=True)
    if pages.is_symlink():
        raise PlanError(f"{pages} is a symbolic link; remove it, or give another --out")
    texts = {pages / f"{name}.md": of_model(name, lines) for name in values(lines, "Model")}
    made = {"csv": as_csv(lines), "md": overview(lines), "html": page(lines)}
    named = {kind: folder / NAMES.get(kind, f"atlas.{kind}") for kind in made}
    texts |= {named[kind]: text for kind, text in made.items()}
    for path, text in texts.items():
        with whole(path) as stream:
            stream.write(text)
    return list(named.values())
