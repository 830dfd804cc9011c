"""The atlas as Markdown: an overview of models by cards, and a page a model. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.commands.atlas.lines import NOTE, Lines, at, covered, values

__all__ = ["FOLDER", "SHORT", "of_model", "overview"]

FOLDER = "models"
"""Where the pages of models lie, beside the overview."""
SHORT = ("Training", "GPUs", "Card", "Fits", "Recipe", "Needs GiB", "Needs +-", "Host GiB",
         "Step s", "Speed", "Too large")  # fmt: skip
READING = (
    "Below: seconds of a step where a recipe is predicted to fit (tight: what there is lies within "
    "the range of what it needs), else the GiB of a GPU, or of the host where that alone is short, "
    "of the recipe that lacks the least. A model's page names the recipes."
)


def overview(lines: Lines) -> str:
    """``atlas.md``: models by cards, a table for each training and number of GPUs."""
    files = "[atlas.html](atlas.html) filters them all; [atlas.csv](atlas.csv) has each number."
    return "\n\n".join(
        ["# Atlas", NOTE, covered(lines), f"{READING} {files}", *_tables(lines)]
    ) + "\n"  # fmt: skip


def of_model(model: str, lines: Lines) -> str:
    """The page of one model, a row a cell."""
    rows = [[at(line, head) for head in SHORT] for line in lines if at(line, "Model") == model]
    return f"# {model}\n\n{_table(SHORT, rows)}\n\nHow to read it: [the atlas](../atlas.md).\n"


def _tables(lines: Lines) -> Iterator[str]:
    cards, gpus = values(lines, "Card"), values(lines, "GPUs")
    for training in values(lines, "Training"):
        for number in gpus:
            some = [x for x in lines if (at(x, "Training"), at(x, "GPUs")) == (training, number)]
            told = {(at(line, "Model"), at(line, "Card")): _told(line) for line in some}
            rows = [
                [
                    f"[{model}]({FOLDER}/{model}.md)",
                    *(told.get((model, card), "") for card in cards),
                ]
                for model in values(some, "Model")
            ]
            count = f"{number} GPU{'s' * (number != '1')}"
            yield f"## {training[0].upper()}{training[1:]}, {count}\n\n" + _table(
                ["Model", *cards], rows
            )


def _told(line: Sequence[str]) -> str:
    """A cell in a few characters."""
    fits = at(line, "Fits")
    if fits in ("yes", "tight"):
        return f"{at(line, 'Step s')} s" + " tight" * (fits == "tight")
    if fits == "host":
        return f"host: {at(line, 'Host GiB')} GiB"
    return f"no: {at(line, 'Needs GiB')} GiB" if fits == "no" else fits


def _table(heads: Sequence[str], rows: Lines) -> str:
    told = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in told)
