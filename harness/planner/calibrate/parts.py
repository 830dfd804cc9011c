"""Stations of each part, in order of worth, with their expected minutes; and their outcomes.

No torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.data.feed import check_data
from harness.json_files import BadFile, read_json, write_json
from harness.launch.sources import digest
from harness.planner.calibration.record import (
    Calibration,
    Ceilings,
    Device,
    MeasuredRow,
    StandingBytes,
)
from harness.planner.calibration.store import Applied
from harness.planner.comparison import predicted_and_measured
from harness.planner.speed.rates import of_device, rates
from harness.planner.speed.roofline import compiles, in_tf32, issues, parts_of, seconds
from harness.prediction import Prediction
from harness.report.figures import derive
from harness.result import Result, Status
from harness.spec import Spec
from harness.suite import matrix
from harness.suite.file import load_suite
from harness.void import shown_status
from strategies import parse
from strategies.workloads import TRAIN

# ---- stations and budget ----
# Pure functions.


@dataclass(frozen=True, kw_only=True)
class Station:
    """One measurement. ``minutes`` is the expected time on this kind of machine.

    ``kind``: measure (``harness.planner.calibrate.stations``), row (one recipe with its
    prediction), check (one recipe of the catalog, several at a time), suite, tests, or meter.
    Rows and checks have a ``spec``.
    """

    name: str
    part: str
    kind: str
    minutes: float
    spec: Spec | None = None

    @property
    def key(self) -> str:
        """The station's name, unique among all parts."""
        return f"{self.part} {self.name}"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A station and its action: run, done (by an earlier call), or skip."""

    station: Station
    action: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The minutes that a call may take (None: no limit), by a clock in seconds."""

    minutes: float | None
    now: Callable[[], float] = time.monotonic
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float | None:
        """The minutes left; None without a limit."""
        return None if self.minutes is None else self.minutes - (self.now() - self.began) / 60

    def lacks(self, minutes: float) -> str:
        """Return why a station of that many minutes does not start; empty if it may."""
        left = self.left
        if left is None or minutes <= left:
            return ""
        return f"needs about {minutes:.1f} min, {max(left, 0.0):.1f} of {self.minutes:g} are left"


def schedule(
    stations: Sequence[Station], minutes: float | None, done: Collection[str], at_a_time: int = 1
) -> list[Planned]:
    """Return a call's actions in order, by expected times; checks run ``at_a_time``."""
    planned, spent = [], 0.0
    for station in stations:
        if station.key in done:
            planned.append(Planned(station=station, action="done", reason="by an earlier call"))
            continue
        budget = Budget(minutes=minutes, now=lambda spent=spent: 60 * spent, began=0.0)
        cost = station.minutes / (at_a_time if station.kind == "check" else 1)
        lack = budget.lacks(cost)
        if not lack:
            spent += cost
        action = "skip" if lack else "run"
        planned.append(Planned(station=station, action=action, reason=lack))
    return planned


PARTS = ("check", "memory", "story")
"""In the order of a first day: does all of it run, the inputs of predictions, the first suites."""
GOAL_BATCH = 128
"""Batch size at which fast-DiT published its speed."""
LOW = (
    "single+bf16_pure+checkpoint+adam8bit+accumulate:steps=4+ema:place=cpu",
    "single+bf16_pure+checkpoint+adam8bit+accumulate:steps=8+ema:place=cpu",
)
"""Low-memory recipes that train that batch on one GPU."""
HOST_BOUND = ("single+bf16", "single+bf16+checkpoint")
"""Recipes that train one sample: the host issues their operations more slowly than a GPU runs
them."""
MEASURES = {
    "cuda": {"products": 1.0, "streams": 0.5, "standing": 0.3, "attention": 1.5, "copies": 0.4,
             "collective": 0.8},
    "cpu": {"products": 0.7, "streams": 0.4, "standing": 0.2, "attention": 0.5, "collective": 0.3},
}  # fmt: skip
"""Device -> station -> minutes."""
ROWS = {
    "cuda": (
        "single+bf16+checkpoint", "single+bf16", "single",
        "single+bf16+checkpoint+adam8bit", "zero2_offload+bf16+checkpoint",
        "ddp+bf16", "zero2+bf16+checkpoint", "zero3+bf16+checkpoint",
        "zero3_offload+bf16+checkpoint",
        "single+bf16+checkpoint+offload_activations:what=checkpoints", "single+bf16+compile",
    ),
    "cpu": (
        "single", "single+bf16", "single+checkpoint", "ddp", "zero2", "zero3", "zero2_offload",
        "single+bf16+checkpoint", "single+adam8bit", "zero3_offload", "ddp+bf16",
        "single+offload_activations", "single+compile",
    ),
}  # fmt: skip
"""Device -> recipes to run and predict, in order of worth."""
MINUTES = {"cuda": 1.5, "cpu": 0.5}
"""Minutes of a row with its prediction, on an idle machine."""
CHECK_MINUTES = {"cuda": 0.6, "cpu": 0.4}
SUITES = {
    "cuda": {"default": 30.0, "ladder": 15.0},
    "cpu": {"default": 9.0, "ladder": 6.0},
}
SMALL_SHARE = {"measure": 0.3, "row": 0.5, "check": 0.8, "suite": 0.6, "tests": 0.5, "meter": 0.3}
"""Share of the minutes that a rehearsal takes; most of it is process start-up."""
CPU_PROCESSES = 2
SMALL_MODEL = "DiT-T/8"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The machine's properties that stations depend on, and the options.

    ``model``: the model of the rows (empty: usual). ``small``: a rehearsal with tiny models and
    shapes. ``rows_known``: earlier results replace the rows of the memory part.
    """

    device: str
    gpus: int = 0
    gpu_bytes: int = 0
    small: bool = False
    model: str = ""
    steps: int = 0
    rows_known: bool = False

    @property
    def usual_model(self) -> str:
        """The model of rows if no other is requested."""
        if self.small:
            return SMALL_MODEL
        return "DiT-XL/2" if self.device == "cuda" else "DiT-S/4"

    @property
    def processes(self) -> int:
        """The processes of a multi-process recipe."""
        return self.gpus if self.device == "cuda" else CPU_PROCESSES


def stations_of(part: str, setting: Setting) -> list[Station]:
    """Return the stations of a part, in order of worth."""
    made = {"check": _check, "memory": _memory, "story": _story}[part](setting)
    if not setting.small:
        return made
    return [dataclasses.replace(s, minutes=s.minutes * SMALL_SHARE[s.kind]) for s in made]


# ---- memory part ----
# Ceilings, then rows.


def _memory(setting: Setting) -> list[Station]:
    measures = [
        Station(name=name, part="memory", kind="measure", minutes=minutes)
        for name, minutes in MEASURES[setting.device].items()
        if name != "collective" or setting.processes > 1
    ]
    if setting.rows_known:
        return measures
    rows = [_row(text, setting) for text in ROWS[setting.device] if _can_be(text, setting)]
    if setting.device != "cuda":
        return [*measures, *rows]
    # The first rows are worth more than attention, copies and collectives.
    host = [_at_batch(recipe, 1, setting) for recipe in HOST_BOUND]
    low = [_at_batch(recipe, GOAL_BATCH, setting) for recipe in LOW]
    return [*measures[:3], *rows[:3], *measures[3:], *host, *low, *rows[3:]]


def _can_be(text: str, setting: Setting) -> bool:
    """Return True if the machine has enough processes for a recipe.

    On one GPU replicas equal plain training, and shards are whole; an offload is still useful.
    """
    if setting.processes > 1:
        return True
    return parse(text).alone(setting.device) or "offload" in text


def _row(text: str, setting: Setting) -> Station:
    processes = 1 if parse(text).alone(setting.device) else setting.processes
    spec = Spec(
        recipe=parse(text).text,
        global_batch=_batch(setting) * processes,
        processes=processes,
        **_usual(setting),
    )
    return Station(name=text, part="memory", kind="row", minutes=MINUTES[setting.device], spec=spec)


def _at_batch(recipe: str, batch: int, setting: Setting) -> Station:
    spec = Spec(recipe=parse(recipe).text, global_batch=batch, **_usual(setting))
    minutes = MINUTES["cuda"] * (1 if batch == 1 else 2)
    name = f"{recipe} at batch {batch}"
    return Station(name=name, part="memory", kind="row", minutes=minutes, spec=spec)


def _usual(setting: Setting) -> dict[str, object]:
    """Return the spec fields of every row."""
    short = setting.small
    steps = setting.steps or (1 if short else 10 if setting.device == "cuda" else 5)
    return {
        "model": setting.model or setting.usual_model,
        "data": "synthetic",
        "device": setting.device,
        "steps": steps,
        "warmup": 1 if short else 3 if setting.device == "cuda" else 2,
    }


def _batch(setting: Setting) -> int:
    """Return samples per process: the batch that fits in plain training; a few on a CPU."""
    if setting.device == "cpu" or setting.small:
        return 8
    usual = {name: value for name, value in _usual(setting).items() if name != "device"}
    check_data(str(usual["data"]))
    return matrix.fitting_batch(usual, setting.gpu_bytes, 1)


# ---- check part ----
# The whole catalog on a small model.


def _check(setting: Setting) -> list[Station]:
    suite = load_suite("check", setting.device)
    model = setting.model or (SMALL_MODEL if setting.small else suite.settings["model"])
    # Replace the model in the suite: a row that needs another kind of model keeps its own.
    suite = dataclasses.replace(suite, settings={**suite.settings, "model": model})
    given: dict[str, object] = {}
    if setting.small or setting.steps:
        given = {"steps": setting.steps or 1, "warmup": 1}
    specs = matrix.specs(suite, given, gpus=setting.gpus, gpu_bytes=setting.gpu_bytes)
    minutes, rows = CHECK_MINUTES[setting.device], []
    for spec in specs:  # one recipe may both train and sample
        name = spec.recipe if spec.workload == TRAIN else f"{spec.workload} {spec.recipe}"
        rows.append(Station(name=name, part="check", kind="check", minutes=minutes, spec=spec))
    if setting.device != "cuda":
        return rows
    tests = Station(name="gpu tests", part="check", kind="tests", minutes=3.0)
    meter = Station(name="what measuring costs", part="check", kind="meter", minutes=4.0)
    return [tests, *rows, meter]


# ---- story part ----
# Suites for the first reports.


def _story(setting: Setting) -> list[Station]:
    return [
        Station(name=name, part="story", kind="suite", minutes=minutes)
        for name, minutes in SUITES[setting.device].items()
    ]


# ---- calibration rows ----
# Pure functions.


def measured_row(
    result: Result,
    prediction: Prediction | None,
    device: Device,
    ceilings: Ceilings,
    standing: StandingBytes,
) -> MeasuredRow:
    """Return ``result`` with its prediction, timed by these ceilings alone."""
    spec, (status, reason) = result.spec, shown_status(result)
    found = {
        "recipe": spec.recipe,
        "model": spec.model,
        "processes": spec.processes,
        "global_batch": spec.global_batch,
        "status": status.value,
        "reason": reason or "",
    }
    if status is not Status.OK:
        return MeasuredRow(**found)
    found |= _measured(result)
    if prediction is None or prediction.method == "none":
        why = prediction.reason if prediction else "it was not predicted"
        return MeasuredRow(**found | {"reason": f"not predicted: {why}"})
    alone = Calibration(device=device, measured="", ceilings=ceilings, standing=standing)
    return MeasuredRow(
        **found, **_parts(result, prediction, alone), **_bytes(result, prediction, alone)
    )


def _measured(result: Result) -> dict[str, object]:
    median = derive.quantile(derive.step_seconds(result), 0.5)
    return {
        "step_seconds": median,
        "flops_per_second": derive.flops_per_second(result.flops_per_step, median),
        "precision": derive.precision(result.evidence) or "",
        "needs_bytes": derive.need_bytes(result.ranks, result.meter),
    }


def _parts(result: Result, prediction: Prediction, alone: Calibration) -> dict[str, Any]:
    """Return the seconds of each part by the ceilings alone, the total by typical figures, and the
    operations that a GPU's host issues (``roofline.issues``).
    """
    if not prediction.work:
        return {}
    typical = of_device(alone.device)
    card = dataclasses.replace(typical, calibrated=Applied(calibration=alone))
    processes = result.spec.processes
    recipe, work = result.spec.recipe, prediction.work
    parts = parts_of(work, rates(card, processes), processes, in_tf32(recipe))
    usual = seconds(work, typical, processes, recipe).total
    count = 0 if card.shared else round(issues(work, compiles(recipe)))
    return {**parts, "typical_seconds": usual, "operations": count}


def _bytes(result: Result, prediction: Prediction, alone: Calibration) -> dict[str, object]:
    pair = predicted_and_measured([result], {result.spec.key: prediction}, alone)
    if pair is None:
        return {}
    known = {
        "step": (pair.step_predicted, pair.step_measured),
        "run": (pair.run_predicted, pair.run_measured),
        "reserved": (pair.reserved_predicted, pair.reserved_measured),
    }
    return {
        **{name: list(both) for name, both in known.items() if all(both)},
        "categories": {c.name: [c.predicted, c.measured] for c in pair.categories},
    }


# ---- outcomes ----
# Files from which a call resumes, and which the archive has.


DONE = ("ok", "partly", "lacking")
"""Final outcomes, which another call would not change."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a station.

    ``status``: ok, partly (some rows of a suite failed), lacking (the machine cannot run it),
    failed, or skipped (no time was left). ``facts`` are its measurements; ``mark`` is a hash of
    device, sources and settings.
    """

    station: str
    part: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    mark: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the outcome below the session's folder."""
        write_json(outcome_file(self.part, self.station, folder), dataclasses.asdict(self))


def outcome_file(part: str, name: str, folder: Path) -> Path:
    """Return the file of a station's outcome."""
    plain = re.sub(r"[^\w.-]+", "_", name)[:60]
    key = hashlib.sha256(name.encode()).hexdigest()[:6]
    return folder / "stations" / f"{part}-{plain}-{key}.json"


def kept(part: str, name: str, folder: Path) -> Outcome | None:
    """Return the outcome of an earlier call; None if there is no readable one."""
    try:
        return read_json(outcome_file(part, name, folder), Outcome)
    except BadFile:
        return None


def mark_of(station: Station, device: Device, small: bool) -> str:
    """Return a hash of everything that decides what a station measures."""
    spec = dataclasses.asdict(station.spec) if station.spec else None
    sources = digest(("planner/calibrate/stations",))
    facts = [dataclasses.asdict(device), sources, station.key, small, spec]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
