"""The atlas as lines of text, a text for each of ``HEADS``: its CSV, and what it covers. No
torch."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from harness.commands.atlas.cells import HEADS
from harness.commands.planning.plan.asked import PlanError
from strategies.files import bounded_text, cell, printable

__all__ = ["FILTERS", "NOTE", "Lines", "as_csv", "at", "covered", "from_csv", "values"]

Lines = Sequence[Sequence[str]]
NOTE = (
    "Predicted without a GPU, one sample a GPU at each model's usual size, encoders and VAE not on "
    "the GPU: the fastest of the recipes that ./run.sh plan tries, or, where none fits, the one "
    "that needs least. Too large: the first of twice, four and eight times the sample that does "
    "not fit with that recipe, by a prediction of it, or where others leave no doubt. Memory "
    "was checked against what public projects measured (docs/models.md: where they state all "
    "settings, tensors between steps within 0.5 % and what the allocator reserves within 3 %; "
    "where some were inferred, within 5 % but for two models' 13 and 15 %). A recipe fits where "
    "the upper ends of its needs do, of a GPU and of the host: 64 GiB of host memory are assumed "
    "for each desktop card and 256 for each other. Times are typical figures with the uncertainty "
    "that stands beside them, and no GPU of these was measured here."
)
FILTERS = ("Model", "Training", "GPUs", "Card", "Fits")


def at(line: Sequence[str], head: str) -> str:
    """The text below ``head``."""
    return line[HEADS.index(head)]


def values(lines: Lines, head: str) -> list[str]:
    """The different texts below ``head``, in their order."""
    return list(dict.fromkeys(at(line, head) for line in lines))


def covered(lines: Lines) -> str:
    """What the atlas is of, in a sentence: what is not named was left out."""
    fits = [line for line in lines if at(line, "Fits") in ("yes", "tight")]
    sought = values([line for line in fits if at(line, "Too large")], "GPUs")
    sizes = ", and the next size that does not fit was not sought"
    if sought:
        some = sought != values(fits, "GPUs")
        sizes = f"{sizes} but for {', '.join(sought)} GPU{'s' * (sought != ['1'])}" if some else ""
    models, _, gpus, cards = (values(lines, head) for head in FILTERS[:4])
    return (
        f"{len(lines)} cells: {len(models)} models ({', '.join(models)}), on "
        f"{', '.join(gpus)} GPUs of {', '.join(cards)}; what is not named was left out{sizes}."
    )


def as_csv(lines: Lines) -> str:
    """The text of ``atlas.csv``."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([HEADS, *(map(cell, line) for line in lines)])
    return out.getvalue()


def from_csv(path: Path) -> list[list[str]]:
    """The lines of an ``atlas.csv``.

    Raises:
        PlanError: it cannot be read, or has other columns or none of the cells.
    """
    try:
        heads, *lines = csv.reader(io.StringIO(printable(bounded_text(path))))
    except (OSError, ValueError, csv.Error) as error:
        raise PlanError(f"from is {str(path)!r}, which is no atlas.csv ({error})") from error
    if tuple(heads) != HEADS or not lines or any(len(line) != len(HEADS) for line in lines):
        raise PlanError(f"from is {str(path)!r}, which has not the columns of an atlas.csv")
    for name in values(lines, "Model"):
        if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
            raise PlanError(f"from is {str(path)!r}, whose model {name!r:.60} is no model's name")
    return lines
