"""Predictions that ship with the project, made or completed.

``python -m tests.made.recorded [MODEL ...]`` plans the models on common cards, and records each
prediction that these plans make (``harness.planner.records``). Predictions that are recorded
already are not made again, so it can be stopped at any time. What is asked for first comes first:
one GPU before several, common cards before others. ``--check`` lists what has a record.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import time
from collections.abc import Iterator, Sequence

from rich.console import Console

from harness.planner import overhead, pool, records
from harness.planner.atlas.command import CARDS
from harness.planner.plan.candidates import Asked, asked_for, lattice_of
from harness.planner.plan.command import add_arguments
from harness.planner.plan.lattice import ADAPTED
from harness.planner.plan.tracing import Asking, PlanProgress
from harness.planner.records import Record, line_of
from harness.planner.verdict import Fit
from harness.prediction import read
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from harness.subjects.library import families
from strategies.base import BadInput

FIRST = ("flux-dev", "wan2.1-1.3b", "wan2.1-14b", "qwen-image", "sd3.5-medium", "z-image",
         "DiT-XL/2", "sd3.5-large", "sana-1.6b", "hunyuanvideo", "pixart-sigma",
         "flux2-klein-4b")  # fmt: skip
"""Models that people ask for first."""
NEAR = ("RTX-4090", "24GiB", "RTX-3090", "16GiB", "12GiB", "RTX-5090")
"""Cards that people ask for first."""
COUNTS = (1, 8, 4, 2)


def places(models: Sequence[str]) -> Iterator[tuple[str, int, str, bool]]:
    """Yield (model, GPUs, card, whether adapters are trained), the most asked for first."""
    rest = tuple(card for card in CARDS if card not in NEAR)
    for gpus, cards in itertools.product(COUNTS, (NEAR, rest)):
        for model, card, adapters in itertools.product(models, cards, (True, False)):
            yield model, gpus, card, adapters


def asked(model: str, gpus: int, card: str) -> tuple[Asked, list[Resolved]]:
    """Return the plan of a model on a number of cards, and its lattice."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    what = "--gpu-memory" if card[:1].isdigit() else "--gpu"
    options = parser.parse_args(["--model", model, "--gpus", str(gpus), what, card])
    found = asked_for(options)
    return found, lattice_of(options, found)


class Ledger:
    """Current records of one model, to which new ones are added."""

    def __init__(self, model: str, day: str) -> None:
        self.model, self.day = model, day
        self.lines = {
            name: line_of(one.day, one.spec, one.kind, read(one.prediction))
            for name, one in records.all_of(model).items()
            if current(name, one)
        }

    def add(self, fits: Sequence[Fit]) -> int:
        """Record the traces of ``fits`` that have no record, and return their number."""
        before = len(self.lines)
        for fit in fits:
            row, kind = fit.resolved, overhead.preferred(fit.gpu.capability)
            if fit.prediction.method == "trace":
                line = line_of(self.day, row.spec.to_dict(), kind, fit.prediction)
                self.lines.setdefault(pool.name(row, kind), line)
        if len(self.lines) > before:
            records.write(self.model, self.lines)
        return len(self.lines) - before


def current(name: str, record: Record) -> bool:
    """Return True if today's code and libraries would find this record."""
    try:
        return pool.name(resolve(Spec(**record.spec)), record.kind) == name
    except (BadInput, TypeError):
        return False


def told(models: Sequence[str]) -> Iterator[str]:
    """Yield a line for each model: its records, and how many of them are current."""
    for model in models:
        found = records.all_of(model)
        good = sum(current(*pair) for pair in found.items())
        yield f"{model}: {len(found)} records, {good} of them of today's code"


def main() -> None:
    """Plan every place, and record what its plan predicts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--check", action="store_true")
    options, console = parser.parse_args(), Console(soft_wrap=True)
    known = [name for name in families.table() if name not in FIRST]
    models = options.models or [*FIRST, *known]
    if options.check:
        console.print("\n".join(told(models)), highlight=False)
        return
    day, began, made = datetime.date.today().isoformat(), time.time(), 0
    ledgers = {model: Ledger(model, day) for model in models}
    with pool.kept_workers():
        for model, gpus, card, adapters in places(models):
            plan, lattice = asked(model, gpus, card)
            rows = [row for row in lattice if (ADAPTED in row.launch.traits) is adapters]
            fits = Asking(plan, 1, PlanProgress(console)).search(rows)[0] if rows else []
            made += ledgers[model].add(fits)
            minutes = (time.time() - began) / 60
            what = f"{model} on {gpus} x {card}, {'adapters' if adapters else 'all weights'}"
            console.print(f"{what}: {made} records in {minutes:.1f} min", highlight=False)


if __name__ == "__main__":
    main()
