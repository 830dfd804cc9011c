"""Each family of public models on two processes under each kind of strategy, run for real.

``python -m tests.made.families [MODEL ...]``, from the repository's root, runs every recipe of
these models (of all), keeps what happened in ``docs/families.json`` and writes the table of
``docs/reference/models.md`` anew. The tests run each model under one of them, and hold the record
to what they see (``tests/strategies/test_publics_launched.py``).
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.result import Result, Status
from harness.spec import Spec
from tests.made.pages import anew, line
from tests.made.publics import MINIATURES, miniature

FILE = ROOT / "docs" / "families.json"
PAGE = ROOT / "docs/reference/models.md"
RECIPES = {
    "ddp": "ddp",
    "zero2": "zero2",
    "zero3": "zero3",
    "lora": "ddp+lora",
    "checkpoint": "ddp+checkpoint",
}
"""Head of a column -> the recipe; each runs on two processes."""
HEADS = ("family", *RECIPES)
LIBRARIES = ("torch", "accelerate", "deepspeed", "diffusers", "peft")
STEPS = 2
NEAR = 1e-4
"""How far losses and gradient norms may be from those of one process, relative."""


def alone(recipe: str) -> str:
    """The same mathematics on one process: what is recomputed is what it was."""
    kept = [part for part in recipe.split("+")[1:] if part != "checkpoint"]
    return "+".join(["single", *kept])


def spec(name: str, recipe: str) -> Spec:
    """A run of a family on two processes, as short as a measured one is."""
    return miniature(name, recipe, processes=2, steps=1)


def kept() -> dict[str, Any]:
    """The record: versions, and a list of cells."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def apart(cell: Mapping[str, Any]) -> float:
    """The most that a loss or a gradient norm differs from that of one process, relative to it."""
    pairs = zip(cell["two"], cell["one"], strict=True)
    return max(abs(two - one) / abs(one) for two, one in pairs)


def told(cell: Mapping[str, Any]) -> str:
    """A cell of the table: how far it is from one process, or how it ended."""
    if cell["status"] != Status.OK.value:
        return str(cell["status"])
    if cell["failed_checks"]:
        return "void"
    return f"{apart(cell):.0e}" if apart(cell) else "0"


def table(record: Mapping[str, Any]) -> list[str]:
    """The table of ``docs/reference/models.md``."""
    cells = {(cell["model"], cell["recipe"]): told(cell) for cell in record["cells"]}
    lines = [line(HEADS), f"|---{'|--:' * len(RECIPES)}|"]
    for name in MINIATURES:
        row = [cells.get((name, recipe), "not run") for recipe in RECIPES.values()]
        lines.append(line([f"`{name}`", *row]))
    return lines


def of_one(train: Callable[..., Any], name: str, recipe: str) -> list[float]:
    """Losses and gradient norms of one process, by ``train`` (``trained_here`` of the tests)."""
    run, log = train(miniature(name, recipe), STEPS)
    return [*log.all_losses(run), *log.all_norms()]


def cell(found: Result, one: list[float]) -> dict[str, Any]:
    """What is kept of a run, beside the values of one process."""
    return {
        "model": found.spec.model,
        "recipe": found.spec.recipe.partition("+accumulate")[0],
        "status": found.status.value,
        "reason": found.reason,
        "failed_checks": [check.name for check in found.audit if not check.ok],
        "evidence": sorted(found.evidence),
        "two": [*found.losses[:STEPS], *found.grad_norms[:STEPS]],
        "one": one,
    }


def ran(models: Sequence[str], folder: Path) -> Iterator[dict[str, Any]]:
    """A cell of each recipe of these models."""
    from tests.conftest import Case, launched_together, trained_here

    train = functools.cache(functools.partial(of_one, trained_here))
    cells = [(name, recipe) for name in models for recipe in RECIPES.values()]
    cases = {f"{name}-{recipe}": Case(spec(name, recipe)) for name, recipe in cells}
    results = launched_together(cases, folder)
    for name, recipe in cells:
        yield cell(results[f"{name}-{recipe}"], train(name, alone(recipe)))


def as_lines(record: Mapping[str, Any]) -> str:
    """JSON with a line for each cell."""
    cells = ",\n".join(json.dumps(cell) for cell in record["cells"])
    return f'{{"made_with": {json.dumps(record["made_with"])},\n"cells": [\n{cells}\n]}}\n'


def main(models: Sequence[str]) -> None:
    """Run these models, and write what is kept and the page."""
    before = kept()["cells"] if FILE.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        cells = {(c["model"], c["recipe"]): c for c in [*before, *ran(models, Path(folder))]}
    order = [(name, recipe) for name in MINIATURES for recipe in RECIPES.values()]
    made_with = {name: version(name) for name in LIBRARIES}
    record = {"made_with": made_with, "cells": [cells[key] for key in order if key in cells]}
    FILE.write_text(as_lines(record), encoding="utf-8")
    lines = table(record)
    PAGE.write_text(anew(PAGE.read_text(encoding="utf-8"), lines), encoding="utf-8")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:] or list(MINIATURES))
