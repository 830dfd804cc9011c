"""Classes of a report: the head of its result set, rows, groups, and unfinished runs.

``grouping`` creates them from results.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import hooks
from harness.json_files import BadFile, read_json
from harness.report.figures import derive
from harness.report.figures.floor import Floor
from harness.report.figures.numbers import Numbers
from harness.report.figures.parity import WRONG
from harness.report.figures.predicted import Predicted
from harness.result import Result, Status
from harness.spec import Spec
from strategies.base import BadInput

FREE = ("recipe", "processes", "nodes", "repeat")
"""Fields of a spec in which rows of one group may differ, because their work is the same."""


@dataclass(frozen=True, kw_only=True)
class SuiteHead:
    """The head of a result set, from ``suite.json``.

    ``calibration``: that of the machine, from a file in the same folder.
    ``skipped`` has a line for each unusable file.
    """

    name: str = ""
    reference: str = ""
    started: str = ""
    calibration: Any = None
    skipped: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Versus:
    """A row compared with its reference row.

    ``front``: on the Pareto front of need and speed. ``need_change_fraction``: change of the
    need. ``parity``: a word of ``harness.report.figures.parity.Verdict``; ``differs_in`` has
    the reason of a bad one.

    ``place`` counts the rows in order. ``rank`` to ``last_rank`` are the ranks that the noise
    leaves to a row: one more than the number of rows that are faster beyond it, and the number of
    rows less those that are slower beyond it. ``speed_differs``: the speed differs from the
    reference's beyond the noise; None if unknown, and then both ranks are ``place``.
    ``speed_same``: the whole interval of the difference lies in the noise floor.
    """

    place: int
    rank: int
    last_rank: int
    front: bool = False
    is_reference: bool
    speed_ratio: float
    speed_differs: bool | None
    speed_same: bool
    need_change_fraction: float | None
    loss_distance: float | None
    grad_norm_distance: float | None
    parity: str
    update_distance: float | None
    differs_in: str

    @property
    def wrong(self) -> bool:
        """True if the row computed something else than it promised; no answer names it."""
        return self.parity in WRONG


@dataclass(kw_only=True, eq=False)
class Row:
    """One spec that ran: its ok results, one for each repetition, and the derived numbers.

    ``floor`` is its group's. ``samples_distance``: the relative L2 error of the stored latents, the
    largest of the repetitions; None for a training, a reference, and rows not comparable with it.
    """

    label: str
    results: list[Result]
    numbers: Numbers
    versus: Versus = None  # type: ignore[assignment]  # set by the row's group
    predicted: Predicted
    notes: list[str]
    floor: Floor | None = None
    samples_distance: float | None = None

    @property
    def first(self) -> Result:
        """The first repetition, from which shared facts are read."""
        return self.results[0]

    @property
    def spec(self) -> Spec:
        return self.first.spec

    @property
    def runs(self) -> list[list[float]]:
        """The timed steps of each repetition, in seconds."""
        return [derive.step_seconds(result) for result in self.results]


@dataclass(kw_only=True)
class Unfinished:
    """A planned run without a measurement to rank: its end and the reason.

    ``so_far_bytes``: the most that its meter counted before the end (a GPU's allocator, or the
    resident mark above the baseline).
    """

    label: str
    status: Status
    reason: str | None
    so_far_bytes: int | None
    result: Result
    predicted: Predicted


@dataclass(kw_only=True)
class Group:
    """Rows that did the same work on the same device, fastest first.

    ``unlike`` has the differences from the first group, which prevent a common ranking.
    ``asked``: the requested reference that ``reference`` replaces; ``asked_ended``: its status,
    empty if it is missing.
    """

    rows: list[Row]
    reference: Row
    unlike: str = ""
    floor: Floor | None = None
    asked: str = ""
    asked_ended: str = ""

    @property
    def meter(self) -> str:
        return self.reference.first.meter

    @property
    def device(self) -> str:
        return device_of(self.reference.first)

    @property
    def runs(self) -> dict[str, list[list[float]]]:
        """The timed steps of each row's repetitions, by label."""
        return {row.label: row.runs for row in self.rows}

    @property
    def draws(self) -> bool:
        """True if the rows draw samples instead of training."""
        return self.reference.spec.sampling


@dataclass(kw_only=True)
class Report:
    """The input of renderings.

    ``skipped`` has a line for each file that is no result.
    """

    suite: SuiteHead
    groups: list[Group] = field(default_factory=list)
    unfinished: list[Unfinished] = field(default_factory=list)
    recorded: list[Result] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def read_suite(folder: Path) -> SuiteHead:
    """Read ``suite.json`` of a result folder, and the calibration beside it.

    A missing file leaves its part empty; an unusable one is named.
    """
    skipped: list[str] = []
    path, calibration = Path(folder) / "suite.json", None
    data: dict[str, Any] = {}
    try:
        data = read_json(path, dict[str, Any]) if path.exists() else {}
    except (BadInput, BadFile) as error:
        skipped.append(str(error))
    try:
        calibration = hooks.planner("read_calibration")(folder)
    except (BadInput, BadFile) as error:
        skipped.append(str(error))
    names = {name: str(data.get(name) or "") for name in ("name", "reference", "started")}
    return SuiteHead(**names, calibration=calibration, skipped=tuple(skipped))


def label(spec: Spec) -> str:
    """Return a run's name, with its repetition if it has one."""
    return spec.recipe + (f" (repeat {spec.repeat})" if spec.repeat else "")


def device_of(result: Result) -> str:
    """Return the device's name; without a GPU, the processor's."""
    facts = result.environment
    name = str(facts.get("device") or result.spec.device)
    return str(facts.get("cpu") or name) if name == "cpu" else name


def work_of(spec: Spec) -> dict[str, Any]:
    """Return the fields of a spec that rows of one ranking share."""
    return {k: v for k, v in dataclasses.asdict(spec).items() if k not in FREE}


def same_work(result: Result) -> tuple[Any, ...]:
    """Return (name, value) of everything that rows of one ranking share.

    It has the spec without ``FREE``, the meter, the device, and the source code (none in old
    results).
    """
    code = str(result.environment.get("code", ""))
    work = tuple(sorted(work_of(result.spec).items()))
    return (*work, ("meter", result.meter), ("device name", device_of(result)), ("code", code))
