"""The stations of each part, in order of worth, with the minutes that are expected. No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from harness.calibrate.station import Station
from harness.data.feed import check_data
from harness.predict.fitting import fitting_batch
from harness.spec import Spec
from harness.suite import matrix
from harness.suite.file import load_suite
from strategies import parse
from strategies.workloads import TRAIN

__all__ = ["GOAL_BATCH", "PARTS", "Setting", "stations_of"]

PARTS = ("check", "memory", "story")
"""In the order of a first day: does all of it run, what predictions assume, the first pictures."""
GOAL_BATCH = 128
"""Samples of the batch that fast-DiT published a speed for."""
LOW = (
    "single+bf16_pure+checkpoint+adam8bit+accumulate:steps=4+ema:place=cpu",
    "single+bf16_pure+checkpoint+adam8bit+accumulate:steps=8+ema:place=cpu",
)
"""Recipes of little memory that train that batch on one GPU."""
MEASURES = {
    "cuda": {"products": 1.0, "streams": 0.5, "standing": 0.3, "attention": 1.5, "copies": 0.4,
             "collective": 0.8},
    "cpu": {"products": 0.7, "streams": 0.4, "standing": 0.2, "attention": 0.5, "collective": 0.3},
}  # fmt: skip
"""Device -> station -> minutes."""
ROWS = {
    "cuda": (
        "single+bf16+checkpoint", "single+bf16", "single", "zero2+bf16+checkpoint of 8",
        "single+bf16+checkpoint+adam8bit", "zero2_offload+bf16+checkpoint",
        "zero3+bf16+checkpoint of 8", "ddp+bf16", "zero2+bf16+checkpoint", "zero3+bf16+checkpoint",
        "zero3_offload+bf16+checkpoint",
        "single+bf16+checkpoint+offload_activations:what=checkpoints", "single+bf16+compile",
    ),
    "cpu": (
        "single", "single+bf16", "single+checkpoint", "ddp", "zero2", "zero3", "zero2_offload",
        "single+bf16+checkpoint", "single+adam8bit", "zero3_offload", "ddp+bf16", "zero2 of 8",
        "zero3 of 8", "single+offload_activations", "single+compile",
    ),
}  # fmt: skip
"""Device -> recipes that are run and predicted, in order of worth: "of 8" is rank 0 of so many."""
MINUTES = {"cuda": 1.5, "cpu": 0.5}
"""Of a row with its prediction, on a free machine."""
CHECK_MINUTES = {"cuda": 0.6, "cpu": 0.4}
SUITES = {
    "cuda": {"default": 30.0, "fast_dit_table": 12.0, "ladder": 15.0},
    "cpu": {"default": 9.0, "fast_dit_table": 5.0, "ladder": 6.0},
}
SMALL_SHARE = {"measure": 0.3, "row": 0.5, "check": 0.8, "suite": 0.6, "tests": 1.0, "meter": 1.0}
"""Of the minutes, in a rehearsal: most of them are the starts of processes."""
WORLD = 8
CPU_PROCESSES = 2
SMALL_MODEL = "DiT-T/8"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The machine as far as stations depend on it, and what was asked for. ``model``: of the rows
    (empty: usual). ``small``: a rehearsal, of tiny models and shapes.
    ``rows_known``: rows that were measured earlier stand for those of the memory part.
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
        """What rows train where no model is asked for."""
        if self.small:
            return SMALL_MODEL
        return "DiT-XL/2" if self.device == "cuda" else "DiT-S/4"

    @property
    def processes(self) -> int:
        """Of a recipe of several."""
        return self.gpus if self.device == "cuda" else CPU_PROCESSES


def stations_of(part: str, setting: Setting) -> list[Station]:
    """The stations of a part in order of worth."""
    made = {"check": _check, "memory": _memory, "story": _story}[part](setting)
    if not setting.small:
        return made
    return [_replaced(s, minutes=s.minutes * SMALL_SHARE[s.kind]) for s in made]


def _replaced(station: Station, minutes: float) -> Station:
    return Station(**{**vars(station), "minutes": minutes})


# ---- memory: ceilings, then rows ----


def _memory(setting: Setting) -> list[Station]:
    measures = [
        Station(name=name, part="memory", kind="measure", minutes=minutes)
        for name, minutes in MEASURES[setting.device].items()
        if name != "collective" or setting.processes > 1
    ]
    if setting.rows_known:
        return measures
    rows = [_row(text, setting) for text in ROWS[setting.device] if _can_be(text, setting)]
    first = len(measures) if setting.device == "cpu" else 3
    low = [_low(recipe, setting) for recipe in LOW] if setting.device == "cuda" else []
    # On a GPU the first rows tell more than attention, copies and collectives.
    return [*measures[:first], *rows[:3], *measures[first:], *low, *rows[3:]]


def _can_be(text: str, setting: Setting) -> bool:
    """Whether a recipe of several processes has them. On one GPU replicas are the plain loop, and
    shards are whole; an offload works there too."""
    if " of " in text or setting.processes > 1:
        return True
    return parse(text).alone(setting.device) or "offload" in text


def _row(text: str, setting: Setting) -> Station:
    recipe, _, world = text.partition(" of ")
    alone = world or parse(recipe).alone(setting.device)
    processes = 1 if alone else setting.processes
    spec = Spec(
        recipe=parse(recipe).text,
        global_batch=_batch(setting) * (int(world) if world else processes),
        processes=processes,
        world=int(world or 0),
        **_usual(setting),
    )
    return Station(name=text, part="memory", kind="row", minutes=MINUTES[setting.device], spec=spec)


def _low(recipe: str, setting: Setting) -> Station:
    spec = Spec(recipe=parse(recipe).text, global_batch=GOAL_BATCH, **_usual(setting))
    name = f"{recipe} at batch {GOAL_BATCH}"
    return Station(name=name, part="memory", kind="row", minutes=2 * MINUTES["cuda"], spec=spec)


def _usual(setting: Setting) -> dict[str, object]:
    """Spec fields of every row."""
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
    """Samples a process: what plain training fits, on a CPU a few."""
    if setting.device == "cpu" or setting.small:
        return 8
    usual = {name: value for name, value in _usual(setting).items() if name != "device"}
    check_data(str(usual["data"]))
    return fitting_batch(usual, setting.gpu_bytes, 1)


# ---- check: the whole catalog on a small model ----


def _named(spec: Spec) -> str:
    """A row's name: one recipe may train and draw samples."""
    return spec.recipe if spec.workload == TRAIN else f"{spec.workload} {spec.recipe}"


def _check(setting: Setting) -> list[Station]:
    suite = load_suite("check", setting.device)
    model = setting.model or (SMALL_MODEL if setting.small else suite.settings["model"])
    # In the suite's place: a row that needs another kind of model keeps its own.
    suite = dataclasses.replace(suite, settings={**suite.settings, "model": model})
    given: dict[str, object] = {}
    if setting.small or setting.steps:
        given = {"steps": setting.steps or 1, "warmup": 1}
    suite, _ = matrix.on_processes(suite, given, gpus=setting.gpus)
    specs = matrix.specs(suite, given, gpus=setting.gpus, gpu_bytes=setting.gpu_bytes)
    minutes = CHECK_MINUTES[setting.device]
    rows = [
        Station(name=_named(spec), part="check", kind="check", minutes=minutes, spec=spec)
        for spec in specs
    ]
    if setting.device != "cuda":
        return rows
    tests = Station(name="gpu tests", part="check", kind="tests", minutes=3.0)
    meter = Station(name="what measuring costs", part="check", kind="meter", minutes=4.0)
    return [tests, *rows, meter]


# ---- story: the suites of the first pictures ----


def _story(setting: Setting) -> list[Station]:
    return [
        Station(name=name, part="story", kind="suite", minutes=minutes)
        for name, minutes in SUITES[setting.device].items()
    ]
