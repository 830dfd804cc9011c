"""Conversion of a suite's rows to specs, once the machine is known. Imports no torch.

load_suite -> on_processes -> specs -> harness.suite.run.run_suite
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from harness.resolve import resolve
from harness.spec import Spec
from harness.subjects import subject_of
from harness.suite.file import ALL, FIT, Suite, SuiteError, SuiteRow, frame_of
from strategies import CATALOG, parse
from strategies.base import Slot
from strategies.subject import Shaping, Subject
from strategies.workloads import SAMPLE, TRAIN

SUITES = {TRAIN: "default", SAMPLE: "sampling"}
"""Workload -> default suite, whose settings also apply to recipes named on the command line."""


def ad_hoc(recipes: Iterable[str], device: str, workload: str = TRAIN) -> Suite:
    """Return a suite of recipes named on the command line, with the settings of ``SUITES``.

    The first recipe is the reference.

    Raises:
        SuiteError: a recipe twice. RecipeError or Conflict: an invalid recipe.
    """
    texts = [parse(text, workload=workload).text for text in recipes]
    base = frame_of(SUITES.get(workload, "default"), device)
    twice = next((t for i, t in enumerate(texts) if t in texts[:i]), None)
    if twice:
        raise SuiteError(f"recipe {twice!r} is given twice; use --repeat to measure it again")
    return dataclasses.replace(
        base,
        name="recipes",
        title="Recipes of the command line",
        repeat=1,
        reference=texts[0],
        rows=tuple(SuiteRow(recipe=text) for text in texts),
    )


def on_processes(
    suite: Suite, overrides: Mapping[str, Any], *, gpus: int = 0
) -> tuple[Suite, list[str]]:
    """Return ``suite`` adapted to the number of processes of its rows, and a description of each
    change.

    - On one process a replicated row becomes the plain loop, and gets its name, as does the
      reference.
    - Rows that become equal are kept once.
    - A single-process row beside rows of several GPUs uses their micro-batch (``alone_beside``).
    - A row whose own batch cannot be divided among its processes (the first of a sweep, on many
      GPUs)
    is omitted.
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
    """Return whether the row's own batch can be divided among ``ranks`` ranks."""
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
    """Return ``row`` adapted to rows of ``ranks`` GPUs whose batch grows with the number of GPUs.

    The whole batch would exceed the memory of one GPU. So a single-process row accumulates it, in
    the micro-batches of the other rows. A row that cannot accumulate takes the share of one GPU. If
    all rows are single-process, the batch is that of one GPU anyway (``specs``). On a CPU the
    processes share one memory, so one process can hold the whole batch.
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
    """Return whether a part of the recipe conflicts with another, on one GPU."""
    batch = parse(text).accumulation
    spec = Spec(recipe=text, device="cuda", data="synthetic", global_batch=batch)
    return resolve(spec).refusal is not None


def unreplicated(text: str, device: str) -> str:
    """Return the recipe on one process without replication, if it replicates the model."""
    sharding = parse(text).sharding
    if "replicas" not in sharding.engine(device).traits:
        return text
    kinds = (kind for kind in CATALOG.values() if kind.slot == Slot.SHARD)
    alone = next(kind.name for kind in kinds if "one_process" in kind.engine(device).traits)
    return "+".join(alone if word == sharding.name else word for word in text.split("+"))


def specs(
    suite: Suite, overrides: Mapping[str, Any], *, gpus: int = 0, gpu_bytes: int = 0
) -> list[Spec]:
    """Return one spec per row and repetition, in rounds that each begin with the reference row.

    Args:
        overrides: Spec fields from the command line; they win. ``repeat`` is the number of
            rounds.
        gpus: value of ``processes: all`` on a GPU machine.
        gpu_bytes: memory of the smallest GPU, for ``per_process_batch: fit``.

    Raises:
        SuiteError: ``processes: all`` or ``per_process_batch: fit`` without a GPU.
    """
    given = {k: v for k, v in overrides.items() if v is not None}
    repeats = given.pop("repeat", suite.repeat)
    for name, number in (("repeat", repeats), ("processes", given.get("processes", 1))):
        if number < 1:  # a single-process recipe would ignore it
            raise SuiteError(f"{name} is {number}; give --{name} at least 1")
    rows = sorted(suite.rows, key=lambda row: row.recipe != suite.reference)
    if given.get("world") and given.get("processes", 1) != 1:
        raise SuiteError(
            f"world is {given['world']} and processes is {given['processes']}; one process stands "
            "for all: leave --processes out"
        )
    # The command line overrides a row's own settings, and these override the suite's.
    settings = dict(suite.settings) | given
    if settings.get("processes") == ALL and _all_alone(suite):
        settings["processes"] = 1
    shared = _on_machine(settings, "global_batch" in given, gpus, gpu_bytes)
    found = [
        _spec(suite, row, shared | dict(row.settings) | given, index)
        for index in range(repeats)
        for row in rows
    ]
    # Rows that differ only in settings given on the command line are one row.
    return list(dict.fromkeys(found))


def _on_machine(
    settings: dict[str, Any], batch_given: bool, gpus: int, gpu_bytes: int
) -> dict[str, Any]:
    """Return ``settings`` with numbers for the words that depend on the machine."""
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
        # One process with the same global batch: the baseline of the others.
        settings |= {"processes": 1, "nodes": 1}
    if row.shares > 1:
        settings["global_batch"] //= row.shares
    return Spec(**settings | {"recipe": recipe.text, "device": suite.device, "repeat": repeat})


# ---- batch size ----
# The micro-batch with which plain float32 training should fit a GPU.


HEADROOM = 0.85
"""Share of a device's memory to plan with; context, libraries and fragmentation take the rest."""
PAPER_BATCH = 256
"""Global batch of the DiT paper (section 4)."""
FULL_BATCH = 64
"""Samples per process at which a large GPU is busy; larger batches only make a suite longer."""
LEAST = 4
"""Least samples per process; four accumulation steps divide it."""
TOKEN = 80
"""Bytes that a block keeps for backward in float32, per token and unit of width. All layers outside
of the blocks together keep half as much as one block."""


def fitting_batch(settings: Mapping[str, Any], device_bytes: int, processes: int) -> int:
    """Return the samples per process with which plain float32 data-parallel training should fit.

    ``settings`` are fields of a spec. The result is a power of two from ``LEAST`` to ``most``. On a
    device that is too small for ``LEAST``, only the rows that save memory run.
    """
    from harness.data.feed import check_data

    known = {name: settings.get(name, getattr(Spec, name)) for name in ("model", "objective")}
    names = [f.name for f in dataclasses.fields(Shaping) if f.name != "data"]
    shaping = Shaping(**{name: settings[name] for name in names if name in settings})
    facts = check_data(settings.get("data", Spec.data))
    subject = subject_of(data=facts, shaping=shaping, **known)
    share, ema = LEAST, bool(settings.get("ema", Spec.ema))
    while 2 * share <= most(processes):
        if plain_bytes(subject, 2 * share, ema=ema) > HEADROOM * device_bytes:
            break
        share *= 2
    return share


def plain_bytes(subject: Subject, samples: int, *, ema: bool) -> int:
    """Return about the peak bytes of plain float32 data-parallel training with ``samples`` per
    process.

    Weights, two moments, DDP's buckets and the average are always allocated. Activations peak when
    backward begins and gradients when it ends, so the larger of the two counts. For a DiT from
    DiT-S/4 on, the result is within 2 % of the trace (``tests/suite/test_fitting.py``).
    """
    weights, size = 4 * subject.sizes.total, subject.dimensions
    activations = samples * size.tokens * size.width * TOKEN * (size.depth + 0.5)
    return int((4 + ema) * weights + max(activations, weights))


def most(processes: int) -> int:
    """Return the largest number of samples per process of a suite."""
    return min(PAPER_BATCH // processes, FULL_BATCH)
