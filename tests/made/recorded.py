"""Predictions that ship with the project, made or completed.

``python -m tests.made.recorded [MODEL ...]`` plans the models on common cards, and records each
prediction that these plans make (``harness.planner.records``). Predictions that are recorded
already are not made again, so it can be stopped at any time. What is asked for first comes first:
common cards before others, one GPU before several. ``--check`` lists what has a record.

After a change of code ``--carry`` traces one record of each combination of strategies anew, and
keeps the others of a combination that comes out alike. ``--anew`` traces every record of the models
anew: for a change that some models see, and the small model of a combination may not.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from harness.commands.progress import Predictions
from harness.planner import overhead, pool, records
from harness.planner.atlas.command import CARDS
from harness.planner.plan.candidates import Asked, asked_for
from harness.planner.plan.command import add_arguments
from harness.planner.plan.tracing import Asking
from harness.planner.records import Record, line_of, record_of
from harness.planner.verdict import Fit
from harness.prediction import Prediction
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
SERVERS = ("H100-80GB", "A100-80GB")
"""Cards of machines with eight GPUs that people ask for first."""


def places(models: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """Yield (model, GPUs, card), the most asked for first."""
    rest = tuple(card for card in CARDS if card not in NEAR)
    alone, servers = (NEAR[:1], NEAR[1:], rest), (SERVERS, (*NEAR, *rest))
    for gpus, cards in [(1, some) for some in alone] + [(8, some) for some in servers]:
        yield from itertools.product(models, (gpus,), cards)
    for gpus in (4, 2):
        yield from itertools.product(models, (gpus,), (*SERVERS, *NEAR, *rest))


def planned(plan: Asked, console: Console) -> list[Fit]:
    """Return all predictions of a plan, with those of the ways out where nothing fits."""
    asking = Asking(plan, 1, Predictions(console))
    fits, _ = asking.search(plan.resolved)
    ways = asking.ways(fits)
    return [*fits, *(ways.tried if ways else ()), *(ways.wider if ways else ())]


def asked(model: str, gpus: int, card: str) -> Asked:
    """Return the plan of a model on a number of cards, which has a lattice."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    what = "--gpu-memory" if card[:1].isdigit() else "--gpu"
    return asked_for(parser.parse_args(["--model", model, "--gpus", str(gpus), what, card]))


def add(model: str, fits: Sequence[Fit], day: str) -> int:
    """Record the traces of ``fits`` that have no record, and return their number."""
    known = records.lines(model)
    new: dict[str, str] = {}
    for fit in fits:
        row, kind = fit.resolved, overhead.preferred(fit.gpu.capability)
        name = pool.name(row, kind)
        if fit.prediction.method == "trace" and name not in known:
            new[name] = line_of(day, row.spec.to_dict(), kind, fit.prediction)
    if new:
        records.write(model, known | new)
    return len(new)


class Kept(NamedTuple):
    """A record by its name, and its row; None if today's code cannot resolve it."""

    name: str
    record: Record
    row: Resolved | None

    @property
    def today(self) -> str:
        """The name that today's code and libraries give it; empty for no row."""
        return pool.name(self.row, self.record.kind) if self.row else ""


def of_model(model: str) -> list[Kept]:
    """Return all records of a model."""
    found = []
    for name, line in records.lines(model).items():
        record, row = record_of(line), None
        with contextlib.suppress(BadInput, TypeError):
            row = resolve(Spec(**record.spec))
        found.append(Kept(name, record, row if row and not row.refusal else None))
    return found


def carry(models: Sequence[str], console: Console) -> None:
    """Trace one record of other code anew for each combination of code, and keep what is alike.

    A combination is an engine with strategies (``records.roots``) on a kind of card. If its trace
    is the same to the byte, its other records are kept under today's names; else all go.
    """
    groups: dict[tuple[str, ...], list[tuple[str, Kept]]] = {}
    for model in models:
        for one in of_model(model):
            if one.today != one.name:
                roots = sorted(records.roots(one.row)) if one.row else ()
                groups.setdefault((one.record.kind, *roots), []).append((model, one))
    for some in groups.values():
        first = min((one for _, one in some if one.row), key=_cost, default=None)
        good = first is not None and same(first)
        for model in dict(some):
            _rename(model, {one.name: one.today if good else "" for m, one in some if m == model})
        what = f"{first.row.spec.model} {first.row.recipe}" if first else "impossible"
        console.print(f"{'alike' if good else 'gone'}: {what}: {len(some)} records")


def _cost(one: Kept) -> tuple[int, int]:
    return one.row.spec.processes, one.row.subject.parameters


def _rename(model: str, names: Mapping[str, str]) -> None:
    """Give records of a model other names; those without one go."""
    lines = records.lines(model)
    old = {name: lines.pop(name) for name in names}
    records.write(model, {names[name]: line for name, line in old.items() if names[name]} | lines)


def anew(models: Sequence[str], console: Console) -> None:
    """Trace each record of the models that is not of today's code, and replace it."""
    day = datetime.date.today().isoformat()
    for model in models:
        for one in of_model(model):
            if one.today == one.name:
                continue
            lines = records.lines(model)
            del lines[one.name]
            if one.row:
                lines[one.today] = line_of(day, one.record.spec, one.record.kind, _traced(one))
            records.write(model, lines)
            console.print(f"{model} {one.record.spec['recipe']}", highlight=False)


def _traced(one: Kept) -> Prediction:
    with tempfile.TemporaryDirectory() as folder:
        (made,) = pool.predict_all([one.row], Path(folder), kind=one.record.kind, jobs=1)
    return made


def same(one: Kept) -> bool:
    """Return True if a new trace is the recorded one, but for the order of its work."""
    record = one.record
    again = record_of(line_of(record.day, record.spec, record.kind, _traced(one)))
    for told in (again, record):
        told.prediction["work"].sort(key=str)
    return again == record


def told(models: Sequence[str]) -> Iterator[str]:
    """Yield a line for each model: its records, and how many of them are current."""
    for model in models:
        found = of_model(model)
        good = sum(one.today == one.name for one in found)
        yield f"{model}: {len(found)} records, {good} of them of today's code"


def main() -> None:
    """Plan every place, and record what its plan predicts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--carry", action="store_true")
    parser.add_argument("--anew", action="store_true")
    options, console = parser.parse_args(), Console(soft_wrap=True)
    known = [name for name in families.table() if name not in FIRST]
    models = options.models or [*FIRST, *known]
    if options.check:
        console.print("\n".join(told(models)), highlight=False)
        return
    if options.carry or options.anew:
        with pool.kept_workers():
            (anew if options.anew else carry)(models, console)
        return
    day, began, made = datetime.date.today().isoformat(), time.time(), 0
    with pool.kept_workers():
        for model, gpus, card in places(models):
            made += add(model, planned(asked(model, gpus, card), console), day)
            minutes = (time.time() - began) / 60
            what = f"{model} on {gpus} x {card}"
            console.print(f"{what}: {made} records in {minutes:.1f} min", highlight=False)


if __name__ == "__main__":
    main()
