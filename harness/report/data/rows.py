"""The classes of a report: the head of its result set, rows, groups, and what did not finish.

``grouping`` makes them of results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.json_files import BadFile, read_json
from harness.planner import forecast
from harness.planner.calibration.record import Calibration
from harness.planner.forecast import Forecast
from harness.report.figures import derive
from harness.report.figures.floor import Floor
from harness.report.figures.numbers import Numbers
from harness.report.figures.parity import WRONG
from harness.report.figures.predicted import (
    Calibrated,
    PredictedAndMeasured,
    PredictedFit,
    read_calibration,
)
from harness.result import Result, Status
from harness.sampling.figures import DrawnRow
from harness.spec import Spec
from strategies.base import BadInput

FREE = ("recipe", "processes", "nodes", "repeat")
"""Fields of a spec in which rows of one group may differ: they do the same work."""


@dataclass(frozen=True, kw_only=True)
class SuiteHead:
    """What ``suite.json`` says at the head of a result set: the suite's name, the recipe of its
    reference row, when it began, the story that its rows tell (``harness.analyses.registry``) and
    their recipes in the suite's order. ``calibration``: of the machine, which lies beside it;
    ``forecast``: what was predicted of the suite for another one, likewise. ``skipped`` has a line
    for each of these files that cannot be used."""

    name: str = ""
    reference: str = ""
    started: str = ""
    story: str = ""
    order: tuple[str, ...] = ()
    calibration: Calibration | None = None
    forecast: Forecast | None = None
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Versus:
    """A row against its reference row. ``front``: on the Pareto front of what a device must have
    free and speed. ``need_change_fraction``: of the former.

    ``parity`` is a word of ``harness.report.figures.parity.Verdict``, and ``differs_in`` what
    stands behind a bad one. ``sibling``: for a row that alters the computation by design, the
    plainest other row that alters the same, and how far it is from that.

    ``place`` counts the rows as they are listed. ``rank`` is the best place that the noise leaves
    a row: one behind all that are faster beyond it. Rows that cannot be told from the fastest
    share the first. ``speed_differs``: from the reference's, beyond the noise; None: not known,
    and then ``rank`` is ``place``. ``speed_margin_fraction``: the share up to which it would not.
    """

    place: int
    rank: int
    front: bool
    is_reference: bool
    speed_ratio: float
    speed_differs: bool | None
    speed_margin_fraction: float | None
    need_change_fraction: float | None
    loss_distance: float | None
    grad_norm_distance: float | None
    parity: str
    moment_distance: float | None = None
    update_distance: float | None = None
    average_distance: float | None = None
    differs_in: str = ""
    sibling: str = ""
    sibling_loss_distance: float | None = None
    sibling_norm_distance: float | None = None

    @property
    def wrong(self) -> bool:
        """Whether it computed something else than it promised: it is in no answer."""
        return self.parity in WRONG


@dataclass(frozen=True, kw_only=True)
class Row:
    """One spec that ran: its ok results, one a repetition, and what was derived from them.
    ``floor`` is its group's. ``drawn``: of a row that draws samples; None of a training."""

    label: str
    results: tuple[Result, ...]
    numbers: Numbers
    versus: Versus | None = None
    predicted: PredictedAndMeasured | None = None
    predicted_fit: PredictedFit | None = None
    calibrated: Calibrated | None = None
    notes: tuple[str, ...] = ()
    floor: Floor | None = None
    drawn: DrawnRow | None = None

    @property
    def first(self) -> Result:
        """The first repetition: facts that all repetitions share are read from it."""
        return self.results[0]

    @property
    def spec(self) -> Spec:
        return self.first.spec

    @property
    def runs(self) -> list[list[float]]:
        """The timed steps of each repetition, in seconds."""
        return [derive.step_seconds(result) for result in self.results]


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """A planned run without a measurement to rank: how it ended, and why.

    ``so_far_bytes``: the highest that its meter counted before it ended (a GPU's allocator, or the
    resident mark above the baseline).
    """

    label: str
    status: Status
    reason: str | None
    so_far_bytes: int | None
    result: Result
    predicted_fit: PredictedFit | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that did the same work on the same device, fastest first; ``unlike`` says how they
    differ from the first group, and so why they are not ranked with it.

    Rows of a simulated world are ordered by what a device must have free: memory is all that they
    tell, and the noise of their times (``floor``) is not asked for.

    ``asked``: the recipe that was to be the reference, where ``reference`` stands in for it, and
    ``asked_ended``: how that row ended; empty where no such row is among the results.
    """

    rows: list[Row]
    reference: Row
    meter: str
    device: str
    unlike: str = ""
    floor: Floor | None = None
    asked: str = ""
    asked_ended: str = ""

    @property
    def draws(self) -> bool:
        """Whether its rows draw samples, and train nothing."""
        return self.reference.spec.sampling

    @property
    def world(self) -> int:
        """The number of ranks that one process stood for; 0 for real runs."""
        return self.reference.spec.world


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that stories and renderings need. ``memory_only`` are results that ran side by
    side, without times; ``skipped`` has a line for each file that was no result."""

    suite: SuiteHead
    groups: list[Group] = field(default_factory=list)
    unfinished: list[Unfinished] = field(default_factory=list)
    recorded: list[Result] = field(default_factory=list)
    memory_only: list[Result] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def read_suite(folder: Path) -> SuiteHead:
    """Return what ``suite.json`` of a result folder says, and the calibration and forecast beside
    it. A file that is missing leaves its part empty; one that cannot be used is named."""
    skipped: list[str] = []

    def tried(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (BadInput, BadFile) as error:
            skipped.append(str(error))
            return None

    beside = {
        "calibration": tried(lambda: read_calibration(folder)),
        "forecast": tried(lambda: forecast.read(folder)),
    }
    path = Path(folder) / "suite.json"
    data = tried(lambda: read_json(path, dict[str, Any]) if path.exists() else None) or {}
    texts = {name: str(data.get(name) or "") for name in ("name", "reference", "started", "story")}
    order = data.get("order")
    recipes = tuple(map(str, order)) if isinstance(order, list) else ()
    return SuiteHead(**texts, order=recipes, skipped=tuple(skipped), **beside)


def label(spec: Spec) -> str:
    """A run's name where its recipe alone may not tell it from another."""
    world = f" (rank 0 of {spec.world})" if spec.world else ""
    return spec.recipe + world + (f" (repeat {spec.repeat})" if spec.repeat else "")


def device_of(result: Result) -> str:
    """The device's name; the processor's where there is no GPU."""
    facts = result.environment
    name = str(facts.get("device") or result.spec.device)
    return str(facts.get("cpu") or name) if name == "cpu" else name


def same_work(result: Result) -> tuple[Any, ...]:
    """What rows must share to be ranked together, as (name, value): the spec but for ``FREE``, the
    meter, the device, and the sources they ran (results older than that fact have none)."""
    spec = dataclasses.asdict(result.spec)
    code = str(result.environment.get("code", ""))
    work = tuple(sorted((k, v) for k, v in spec.items() if k not in FREE))
    return (*work, ("meter", result.meter), ("device name", device_of(result)), ("code", code))
