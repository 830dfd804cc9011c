"""Each family of public models on two processes under each kind of strategy, run for real.

``python -m tests.made.families [MODEL ...]``, from the repository's root, runs every recipe of
these models (of all), keeps what happened in ``docs/families.json`` and writes the table of
``docs/models.md`` anew. The tests run a part of it (``tests/strategies/test_publics_launched.py``).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.result import Status
from tests.made.pages import anew, line
from tests.made.publics import MINIATURES, miniature

__all__ = ["FILE", "NEAR", "PAGE", "RECIPES", "alone", "apart", "kept", "table"]

FILE = ROOT / "docs" / "families.json"
PAGE = ROOT / "docs" / "models.md"
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
    """The same on one process."""
    return "+".join(["single", *recipe.split("+")[1:]])


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
    """The table of ``docs/models.md``."""
    cells = {(cell["model"], cell["recipe"]): told(cell) for cell in record["cells"]}
    lines = [line(HEADS), f"|---{'|--:' * len(RECIPES)}|"]
    for name in MINIATURES:
        row = [cells.get((name, recipe), "not run") for recipe in RECIPES.values()]
        lines.append(line([f"`{name}`", *row]))
    return lines


# ---- running them ----


def ran(models: Sequence[str], folder: Path) -> Iterator[dict[str, Any]]:
    """A cell of each recipe of these models: losses and gradient norms of two processes, and of
    one."""
    from tests.conftest import Case, launched_together, trained_here

    specs = {
        f"{name}-{head}": miniature(name, recipe, processes=2)
        for name in models
        for head, recipe in RECIPES.items()
    }
    results = launched_together({key: Case(spec) for key, spec in specs.items()}, folder)
    for key, spec in specs.items():
        run, log = trained_here(miniature(spec.model, alone(spec.recipe)), STEPS)
        found = results[key]
        yield {
            "model": spec.model,
            "recipe": spec.recipe,
            "status": found.status.value,
            "reason": found.reason,
            "failed_checks": [check.name for check in found.audit if not check.ok],
            "evidence": sorted(found.evidence),
            "two": [*found.losses[:STEPS], *found.grad_norms[:STEPS]],
            "one": [*log.all_losses(run), *log.all_norms()],
        }


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
