"""Predictions that ship with the project: what is missing, and how it is filled.

``python -m tests.refill [MODEL ...]`` plans the questions of the pages and of each model on common
cards, and records each prediction that a plan makes (``harness.planner.records``). It can be
stopped at any time: what is recorded is not made again. Records that no plan finds any more go.
``--check`` only prints the questions that lack a record; the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from rich.console import Console

from harness import ROOT
from harness.commands.progress import Predictions
from harness.planner import overhead, pool, records
from harness.planner.atlas.command import CARDS
from harness.planner.plan.candidates import Asked, asked_for
from harness.planner.plan.command import add_arguments
from harness.planner.plan.tracing import Asking
from harness.planner.records import Record, line_of, record_of
from harness.planner.verdict import Fit
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from harness.subjects.library import families
from strategies.base import BadInput

USUAL = ("--gpus 8 --gpu A100-80GB", "--gpus 1 --gpu RTX-4090")
"""Questions that name no model."""


def of_pages() -> list[str]:
    """Return the words of each plan on a page that asks for the fastest recipe."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text("utf-8") for page in pages).replace("\\\n", " ")
    words = r"(?: --(?:model|gpus|gpu|gpu-memory|frames|resolution|global-batch) [\w./-]+)"
    found = re.findall(rf"\bplan({words}+)(?=[\n`\"'|\\])", text)
    return sorted({*USUAL, *(one.strip() for one in found if _possible(one))})


def _possible(words: str) -> bool:
    """Return whether a plan asks of a card, and of a model that ships with the project."""
    name = re.search(r"--model ([^\s:]+)", words)
    known = name is None or name[1] in families.table() or name[1].startswith("DiT-")
    return known and "NAME" not in words and "--gpu" in words.replace("--gpus", "")


def of_models(models: Sequence[str]) -> Iterator[str]:
    """Yield the words of a plan of each model on each card."""
    cards = [*(f"--gpu {name}" for name in CARDS), "--gpu-memory 24GiB"]
    for gpus, model, card in itertools.product((1, 8), models, cards):
        yield f"--model {model} --gpus {gpus} {card}"


def asked(words: str) -> Asked:
    """Return the checked rows of a plan, such as ``--model flux-dev --gpu RTX-4090``."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return asked_for(parser.parse_args(shlex.split(words)))


def planned(words: str, console: Console) -> list[Fit]:
    """Return all predictions of a plan, with those of the ways out where nothing fits."""
    asking = Asking(asked(words), 1, Predictions(console))
    fits, _, tried = asking.answer()
    return [*fits, *(tried or ())]


class Missing(Exception):
    """A plan needs a prediction that has no record."""


def missing(words: str) -> str:
    """Return the first recipe of a plan whose prediction has no record; empty if there is none."""

    def refuse(rows: Sequence[Resolved], *_: Any) -> Iterator[Any]:
        # What is refused, or cannot be predicted, starts no process and has no record.
        if able := [row for row in rows if not row.refusal]:
            raise Missing(f"{able[0].recipe} on {able[0].spec.processes} GPUs")
        return plain(rows, *_)

    plain, quiet = pool._each, Console(quiet=True)
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = mock.patch.object(pool, "ROOT", Path(folder))  # no predictions of earlier plans
        with elsewhere, mock.patch.object(pool, "_each", refuse):
            try:
                planned(words, quiet)
            except Missing as one:
                return str(one)
    return ""


def add(fits: Iterable[Fit], day: str) -> None:
    """Record the traces of ``fits`` that have no record."""
    for fit in fits:
        row, kind = fit.resolved, overhead.preferred(fit.gpu.capability)
        known, name = records.lines(row.spec.model), records.name(row, kind)
        if fit.prediction.method == "trace" and name not in known:
            line = line_of(day, row.spec, kind, fit.prediction)
            records.write(row.spec.model, known | {name: line})


def drop_old(models: Sequence[str]) -> int:
    """Drop the records that today's plans cannot find, and return their number."""
    gone = 0
    for model in models:
        known = records.lines(model)
        good = {one.name: known[one.name] for one in of_model(model) if one.found}
        gone += len(known) - len(good)
        if good != known:
            records.write(model, good)
    return gone


class Kept(NamedTuple):
    """A record by its name, and its row; None if today's code cannot resolve it."""

    name: str
    record: Record
    row: Resolved | None

    @property
    def found(self) -> bool:
        """Whether a plan of its row finds it."""
        return self.row is not None and records.name(self.row, self.record.kind) == self.name


def of_model(model: str) -> list[Kept]:
    """Return all records of a model."""
    kept = []
    for name, line in records.lines(model).items():
        record, row = record_of(line), None
        with contextlib.suppress(BadInput, TypeError):
            row = resolve(Spec(**record.spec))
        kept.append(Kept(name, record, row if row and not row.refusal else None))
    return kept


def main() -> int:
    """Drop old records; plan each question that lacks one, and record what its plan predicts."""
    named = [word for word in sys.argv[1:] if word != "--check"]
    models = named or ["DiT-XL/2", *families.table()]
    questions = [*(() if named else of_pages()), *of_models(models)]
    day, console = datetime.date.today().isoformat(), Console(soft_wrap=True, highlight=False)
    if "--check" in sys.argv:
        lacks = [f"{words}: {one}" for words in questions if (one := missing(words))]
        console.print("\n".join([*lacks, f"{len(lacks)} questions lack a record"]))
        return min(len(lacks), 1)
    console.print(f"{drop_old(models)} old records dropped")
    with pool.kept_workers():
        for words in questions:
            if missing(words):
                add(planned(words, console), day)
                console.print(words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
