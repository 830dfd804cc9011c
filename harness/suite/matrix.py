"""The matrix: a suite's rows as specs, once the machine is known. No torch.

load_suite -> on_processes -> specs -> harness.suite.run.run_suite
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from harness.planner.fitting import fitting_batch
from harness.resolve import resolve
from harness.spec import Spec
from harness.suite.file import ALL, FIT, Suite, SuiteError, SuiteRow, load_suite
from strategies import CATALOG, parse
from strategies.base import Slot
from strategies.workloads import SAMPLE, TRAIN

SUITES = {TRAIN: "default", SAMPLE: "sampling"}
"""Workload -> the suite that is run where none is named, and whose settings named recipes take."""


def ad_hoc(recipes: Iterable[str], device: str, workload: str = TRAIN) -> Suite:
    """A suite of recipes named on the command line, with the settings of ``SUITES``.

    The first recipe is the reference.

    Raises:
        SuiteError: a recipe twice. RecipeError or Conflict: a recipe that is none.
    """
    texts = [parse(text, workload=workload).text for text in recipes]
    base = load_suite(SUITES.get(workload, "default"), device)
    twice = next((t for i, t in enumerate(texts) if t in texts[:i]), None)
    if twice:
        raise SuiteError(f"recipe {twice!r} is given twice; use --repeat to measure it again")
    return dataclasses.replace(
        base,
        name="recipes",
        title="Recipes of the command line",
        story="",
        reference=texts[0],
        rows=tuple(SuiteRow(recipe=text) for text in texts),
    )


def on_processes(
    suite: Suite, overrides: Mapping[str, Any], *, gpus: int = 0
) -> tuple[Suite, list[str]]:
    """``suite`` as it can be compared on the processes that its rows get, and what was changed.

    One process has nobody to average with: there a row of replicas is the plain loop, and is named
    so, the reference too. Rows that become equal are kept once. A row that trains alone beside
    rows of several GPUs takes micro batches of their size (``alone_beside``). A row whose own
    batch cannot be divided among its processes (a sweep's first, on many GPUs) is left out.
    """
    given = {k: v for k, v in overrides.items() if v is not None}

    def ranks(row: SuiteRow) -> int:
        asked = {**suite.settings, **row.settings, **given}
        processes = asked.get("processes", 1)
        return asked.get("world") or (gpus if processes == ALL else processes)

    def fitted(row: SuiteRow) -> SuiteRow:
        if ranks(row) == 1:
            return dataclasses.replace(row, recipe=unreplicated(row.recipe, suite.device))
        chosen = "global_batch" in given or "global_batch" in row.settings
        grows = "per_process_batch" in suite.settings and not chosen and not given.get("world")
        return alone_beside(row, suite, ranks(row)) if grows else row

    rows = list(map(fitted, suite.rows))
    changes = {
        old.recipe: new.recipe
        for old, new in zip(suite.rows, rows, strict=True)
        if old.recipe != new.recipe
    }
    chosen = "global_batch" in given
    unequal = [row for row in rows if not (chosen or _divides(suite, row, ranks(row)))]
    once = tuple(row for i, row in enumerate(rows) if row not in rows[:i] and row not in unequal)
    reference = next(
        new.recipe
        for old, new in zip(suite.rows, rows, strict=True)
        if old.recipe == suite.reference
    )
    said = [_said(suite, old, new, gpus) for old, new in changes.items()]
    said += [f"{_gpus(gpus)}: {row.recipe} {APART}" for row in once if row.shares > 1]
    said += [_left_out(row, ranks(row)) for row in unequal]
    return dataclasses.replace(suite, rows=once, reference=reference), said


def _divides(suite: Suite, row: SuiteRow, ranks: int) -> bool:
    """Whether a batch of the row's own can be divided among so many ranks."""
    recipe, batch = parse(row.recipe), row.settings.get("global_batch")
    if batch is None or recipe.alone(suite.device) or not ranks:
        return True
    return batch % (recipe.shares(suite.device, ranks) * recipe.accumulation) == 0


def _left_out(row: SuiteRow, ranks: int) -> str:
    batch = row.settings["global_batch"]
    return f"{ranks} processes: {row.recipe} of batch {batch} is left out, it does not divide"


APART = "cannot accumulate, so it takes the batch of one of them, and is compared with none of them"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


def _said(suite: Suite, old: str, new: str, gpus: int) -> str:
    if parse(old).alone(suite.device):
        return f"{_gpus(gpus)}: {old} is {new}, so that its micro batch is that of the others"
    return f"one process: {old} is {new}"


def alone_beside(row: SuiteRow, suite: Suite, ranks: int) -> SuiteRow:
    """``row`` as it fits beside rows of ``ranks`` GPUs whose batch grows with them.

    On one GPU the whole batch would run out of the memory that it was chosen for. So a row that
    trains alone accumulates it, in micro batches of the others' size; one that cannot takes the
    share of one GPU. Where all rows train alone the batch is that of one GPU anyway (``specs``).
    On a CPU the processes share one memory, so that one may hold what all of them do.
    """
    recipe = parse(row.recipe, ema=suite.settings.get("ema", 1.0) > 0)
    if suite.device != "cuda" or not recipe.alone(suite.device) or _all_alone(suite):
        return row
    kept = [w for w in row.recipe.split("+") if w.partition(":")[0] != "accumulate"]
    words = "+".join([*kept, f"accumulate:steps={ranks * recipe.accumulation}"])
    if _refused(words) and not _refused(row.recipe):
        return dataclasses.replace(row, shares=ranks)
    return dataclasses.replace(
        row, recipe=parse(words, ema=suite.settings.get("ema", 1.0) > 0).text
    )


def _all_alone(suite: Suite) -> bool:
    return all(parse(row.recipe).alone(suite.device) for row in suite.rows)


def _refused(text: str) -> bool:
    """Whether a part of the recipe refuses to be beside another, on one GPU."""
    batch = parse(text).accumulation
    spec = Spec(recipe=text, device="cuda", data="synthetic", global_batch=batch)
    return resolve(spec).refusal is not None


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
    if settings.get("processes") == ALL and _all_alone(suite):
        settings["processes"] = 1
    shared = _on_machine(settings, "global_batch" in given, gpus, gpu_bytes)
    found = [
        _spec(suite, row, shared | dict(row.settings) | given, index)
        for index in range(repeats)
        for row in rows
    ]
    # Rows that differ in what the command line settles for all of them are one.
    return list(dict.fromkeys(found))


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
    workload = settings.get("workload", TRAIN)
    recipe = parse(row.recipe, ema=settings.get("ema", 1.0) > 0, workload=workload)
    if recipe.alone(suite.device) or settings.get("world"):
        # One process of the same global batch: what the others are measured against.
        settings |= {"processes": 1, "nodes": 1}
    if row.shares > 1:
        settings["global_batch"] //= row.shares
    return Spec(**settings | {"recipe": recipe.text, "device": suite.device, "repeat": repeat})
