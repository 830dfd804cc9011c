"""The matrix: a suite's rows as specs, once the machine is known. No torch.

load_suite -> on_processes -> specs -> harness.suite.run.run_suite
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from harness.predict.fitting import fitting_batch
from harness.spec import Spec
from harness.suite.file import ALL, FIT, Suite, SuiteError, SuiteRow, load_suite
from strategies import CATALOG, parse
from strategies.base import Slot

__all__ = ["ad_hoc", "on_processes", "specs", "unreplicated"]


def ad_hoc(recipes: Iterable[str], device: str) -> Suite:
    """A suite of recipes named on the command line, with the default suite's settings.

    The first recipe is the reference.

    Raises:
        SuiteError: a recipe twice. RecipeError or Conflict: a recipe that is none.
    """
    base, texts = load_suite("default", device), [parse(text).text for text in recipes]
    twice = next((t for i, t in enumerate(texts) if t in texts[:i]), None)
    if twice:
        raise SuiteError(f"recipe {twice!r} is given twice; use --repeat to measure it again")
    return dataclasses.replace(
        base,
        name="recipes",
        title="Recipes of the command line",
        reference=texts[0],
        rows=tuple(SuiteRow(recipe=text) for text in texts),
    )


def on_processes(
    suite: Suite, overrides: Mapping[str, Any], *, gpus: int = 0
) -> tuple[Suite, list[str]]:
    """``suite`` as it can be compared on the processes that its rows get, and what was changed.

    One process has nobody to average with: there a row of replicas is the plain loop, and is named
    so, the reference too. Rows that become equal are kept once.
    """
    given = {k: v for k, v in overrides.items() if v is not None}

    def renamed(recipe: str, settings: Mapping[str, Any]) -> str:
        asked = {**suite.settings, **settings, **given}
        processes = asked.get("processes", 1)
        one = (gpus if processes == ALL else processes) == 1 and not asked.get("world")
        return unreplicated(recipe, suite.device) if one else recipe

    rows = [dataclasses.replace(r, recipe=renamed(r.recipe, r.settings)) for r in suite.rows]
    changes = {
        old.recipe: new.recipe
        for old, new in zip(suite.rows, rows, strict=True)
        if old.recipe != new.recipe
    }
    once = tuple(row for index, row in enumerate(rows) if row not in rows[:index])
    reference = next(
        new.recipe
        for old, new in zip(suite.rows, rows, strict=True)
        if old.recipe == suite.reference
    )
    said = [f"one process: {old} is {new}" for old, new in changes.items()]
    return dataclasses.replace(suite, rows=once, reference=reference), said


def unreplicated(text: str, device: str) -> str:
    """The same recipe on one process that trains alone, if it replicates the model over several."""
    sharding = parse(text).sharding
    if "replicas" not in sharding.engine(device).traits:
        return text
    kinds = (kind for kind in CATALOG.values() if kind.slot == Slot.SHARD)
    alone = next(kind.name for kind in kinds if "one_process" in kind.engine(device).traits)
    return "+".join(alone if word == sharding.name else word for word in text.split("+"))


def specs(
    suite: Suite, overrides: Mapping[str, Any], *, gpus: int = 0, gpu_bytes: int = 0
) -> list[Spec]:
    """One spec a row and repetition: the reference row first, repetitions one after another.

    Args:
        overrides: Spec fields from the command line; they win. ``repeat`` is how many times.
        gpus: what ``processes: all`` means on a GPU machine.
        gpu_bytes: memory of the smallest of them, for ``per_process_batch: fit``.

    Raises:
        SuiteError: ``processes: all`` or ``per_process_batch: fit`` without a GPU.
    """
    given = {k: v for k, v in overrides.items() if v is not None}
    repeats = given.pop("repeat", 1)
    for name, number in (("repeat", repeats), ("processes", given.get("processes", 1))):
        if number < 1:  # a recipe of one process would not look at it
            raise SuiteError(f"{name} is {number}; give --{name} at least 1")
    rows = sorted(suite.rows, key=lambda row: row.recipe != suite.reference)
    if given.get("world") and given.get("processes", 1) != 1:
        raise SuiteError(
            f"world is {given['world']} and processes is {given['processes']}; one process stands "
            "for all: leave --processes out"
        )
    # The command line wins over a row's own settings, and these over the suite's.
    settings = dict(suite.settings) | given
    shared = _on_machine(settings, "global_batch" in given, gpus, gpu_bytes)
    return [
        _spec(suite, row, shared | dict(row.settings) | given, index)
        for index in range(repeats)
        for row in rows
    ]


def _on_machine(
    settings: dict[str, Any], batch_given: bool, gpus: int, gpu_bytes: int
) -> dict[str, Any]:
    """``settings`` with the words that depend on the machine as numbers."""
    if settings.get("world"):
        settings["processes"] = 1
    if settings.get("processes") == ALL:
        if not gpus:
            raise SuiteError("processes: all means all GPUs, and there is none; give --processes")
        settings["processes"] = gpus
    share = settings.pop("per_process_batch", None)
    processes = settings.get("world") or settings.get("processes", 1)
    if batch_given or share is None:
        return settings
    if share == FIT:
        if not gpu_bytes:
            raise SuiteError(
                "per_process_batch: fit needs a GPU's memory, and there is none; "
                "give --global-batch"
            )
        share = fitting_batch(settings, gpu_bytes, processes)
    settings["global_batch"] = share * processes
    return settings


def _spec(suite: Suite, row: SuiteRow, settings: dict[str, Any], repeat: int) -> Spec:
    recipe = parse(row.recipe, ema=settings.get("ema", 1.0) > 0)
    if recipe.alone(suite.device) or settings.get("world"):
        # One process of the same global batch: what the others are measured against.
        settings |= {"processes": 1, "nodes": 1}
    return Spec(**settings | {"recipe": recipe.text, "device": suite.device, "repeat": repeat})
