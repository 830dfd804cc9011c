"""Conversion of a suite's rows to specs, once the machine is known. Imports no torch.

load_suite -> specs -> harness.suite.run.run_suite
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from harness.spec import Spec, check_sizes
from harness.subjects import subject_of
from harness.suite.file import ALL, FIT, Suite, SuiteError, SuiteRow, framed
from strategies import parse
from strategies.subject import Shaping, Subject
from strategies.workloads import SAMPLE, TRAIN

SUITES = {TRAIN: "default", SAMPLE: "sampling"}
"""Workload -> default suite, whose settings also apply to recipes named on the command line."""
ONE_GPU = "one_gpu"
"""Default suite of a machine with one GPU, on which nothing is replicated or shared."""


def usual_suite(workload: str, device: str, gpus: int) -> str:
    """Return the name of the suite that runs if none is named."""
    alone = workload == TRAIN and device == "cuda" and gpus == 1
    return ONE_GPU if alone else SUITES.get(workload, "default")


def ad_hoc(recipes: Iterable[str], device: str, workload: str = TRAIN) -> Suite:
    """Return a suite of recipes named on the command line, with the settings of ``SUITES``.

    The first recipe is the reference.

    Raises:
        SuiteError: a recipe twice. RecipeError or Conflict: an invalid recipe.
    """
    texts = [parse(text, workload=workload).text for text in recipes]
    base, _ = framed(SUITES.get(workload, "default"), device)
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
    check_sizes({**given, "repeat": repeats}, "--")
    rows = sorted(suite.rows, key=lambda row: row.recipe != suite.reference)
    # The command line overrides a row's own settings, and these override the suite's.
    settings = dict(suite.settings) | given
    shared = _on_machine(settings, "global_batch" in given, gpus, gpu_bytes)
    found: dict[Spec, None] = {}  # rows that differ only in settings given here are one row
    for index, row in itertools.product(range(repeats), rows):
        fields = shared | dict(row.settings) | given
        workload = fields.get("workload", TRAIN)
        recipe = parse(row.recipe, ema=fields.get("ema", 1.0) > 0, workload=workload)
        if recipe.alone(suite.device):
            # One process with the same global batch: the baseline of the others.
            fields |= {"processes": 1, "nodes": 1}
        fields |= {"recipe": recipe.text, "device": suite.device, "repeat": index}
        found[Spec(**fields)] = None
    return list(found)


def _on_machine(
    settings: dict[str, Any], batch_given: bool, gpus: int, gpu_bytes: int
) -> dict[str, Any]:
    """Return ``settings`` with numbers for the words that depend on the machine."""
    if settings.get("processes") == ALL:
        if not gpus:
            raise SuiteError("processes: all means all GPUs, and there is none; give --processes")
        settings["processes"] = gpus
    share = settings.pop("per_process_batch", None)
    processes = settings.get("processes", 1)
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


# ---- the micro-batch with which plain float32 training should fit a GPU ----

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
    DiT-S/4 on, the result is within 2 % of the trace (``tests/suite/test_matrix.py``).
    """
    weights, size = 4 * subject.survey.sizes.total, subject.survey
    activations = samples * size.tokens * size.width * TOKEN * (size.depth + 0.5)
    return int((4 + ema) * weights + max(activations, weights))


def most(processes: int) -> int:
    """Return the largest number of samples per process of a suite."""
    return min(PAPER_BATCH // processes, FULL_BATCH)
