"""One call of ``calibrate``: its folder, what it was asked for, and what earlier calls left."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from harness import ROOT
from harness.planner.calibrate.parts import (
    DONE,
    Budget,
    Outcome,
    Setting,
    Station,
    kept,
    mark_of,
    stations_of,
)
from harness.planner.calibration import store
from harness.planner.calibration.record import Device
from harness.resolve import Resolved, resolve
from harness.result import BadResult, Result, Status, load
from harness.spec import Spec
from harness.suite.rows import identity
from harness.suite.run import KEPT, Planned, plan, seen
from harness.system.machine import Machine

# ---- together ----
# Runs of the catalog, several at a time: whether each ends well matters, and no time of theirs.


PROCESS_BYTES = 3 * 2**30
"""Memory of one process of a small model, with its libraries."""
GPU_BYTES = 6 * 2**30
"""The same on a GPU, with its context; a run has a process on each."""
MOST = 8
TERM_SECONDS = 20.0
Ended = Callable[[Planned, Result | None, str], None]
"""Told of each row: its result, or None and why it was not begun."""


def default_jobs(machine: Machine, gpu_bytes: int) -> int:
    """Runs at a time: by cores (two for a run's processes), by memory, and by the GPU's (0: runs
    on the CPU)."""
    limits = [MOST, max(2, machine.cores // 2), machine.memory_bytes // (2 * PROCESS_BYTES)]
    if gpu_bytes:
        limits.append(gpu_bytes // GPU_BYTES)
    return max(1, min(limits))


@dataclasses.dataclass
class Together:
    """A pool of such runs. ``lacks``: why a row is not begun any more; empty where it may be."""

    machine: Machine
    timeout: float
    lacks: Callable[[], str]
    ended: Ended
    fresh: bool = False
    children: set[subprocess.Popen[bytes]] = dataclasses.field(default_factory=set)
    stopped: bool = False

    def run(self, rows: Sequence[Planned], jobs: int) -> None:
        """All of them; what an earlier call did counts.

        Raises:
            KeyboardInterrupt: Ctrl-C; the runs that were under way have ended.
        """
        turn = threading.Lock()  # one row is told of at a time
        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(self._one, row, turn) for row in rows]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self.stopped = True
                for future in futures:
                    future.cancel()
                self._end_children()
                raise

    def _one(self, row: Planned, turn: threading.Lock) -> None:
        if self.stopped:
            return
        try:
            result, why = self._result(row)
        except Exception as error:  # a full disk, say: the others go on
            result, why = _failed(row, f"{type(error).__name__}: {error}"), ""
        if not self.stopped:
            with turn:
                self.ended(row, result, why)

    def _result(self, row: Planned) -> tuple[Result | None, str]:
        mark = identity(row.resolved, self.machine)
        earlier = None if self.fresh else _finished(row.folder, mark)
        if earlier is not None:
            return earlier, ""
        if row.status is not None:
            return _not_run(row, self.machine), ""
        if lack := self.lacks():
            return None, lack
        return self._launched(row, mark), ""

    def _launched(self, row: Planned, mark: str) -> Result:
        row.folder.mkdir(parents=True, exist_ok=True)
        (row.folder / "result.json").unlink(missing_ok=True)  # an old one is not this run's
        asked = row.folder / "spec.json"
        asked.write_text(json.dumps(dataclasses.asdict(row.resolved.spec)), encoding="utf-8")
        words = [str(asked), str(row.folder), str(self.timeout)]
        child = subprocess.Popen(
            [sys.executable, "-m", "harness.planner.calibrate.one", *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(row.folder / "launcher.txt").open("wb"),
            start_new_session=True,
        )
        self.children.add(child)
        if self.stopped:  # in between
            child.terminate()
        try:
            child.wait()
        finally:
            self.children.discard(child)
        try:
            result = load(row.folder / "result.json")
        except BadResult:
            result = _lost(row, child.returncode)
        result.environment = result.environment or seen(row.resolved.spec.device, self.machine)
        result.identity = mark
        result.write(row.folder / "result.json")
        return result

    def _end_children(self) -> None:
        """As Ctrl-C would: each ends its own processes, and has some seconds for it."""
        children = list(self.children)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + TERM_SECONDS
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, deadline - time.monotonic()))


def _finished(folder: Path, mark: str) -> Result | None:
    """The earlier result of the same spec, code and machine, if it needs no repeating."""
    try:
        result = load(folder / "result.json")
    except BadResult:
        return None
    return result if result.identity == mark and result.status in KEPT else None


def _not_run(row: Planned, machine: Machine) -> Result:
    """A row that this machine cannot run."""
    spec = row.resolved.spec
    return Result(
        status=row.status or Status.UNSUPPORTED,
        spec=spec,
        reason=row.lack.reason if row.lack else "",
        way_out=row.lack.way_out if row.lack else "",
        environment=seen(spec.device, machine),
    )


def _lost(row: Planned, code: int | None) -> Result:
    return _failed(row, f"its launcher ended with exit code {code} and left no result")


def _failed(row: Planned, reason: str) -> Result:
    return Result(status=Status.FAILED, spec=row.resolved.spec, reason=reason)


@dataclass
class Session:
    """``tell`` prints a line. ``jobs``: runs of the check at a time (0: as many as fit). ``known``:
    results of this device, measured earlier, by which predictions are calibrated too."""

    folder: Path
    machine: Machine
    setting: Setting
    budget: Budget
    tell: Callable[[str], None]
    fresh: bool = False
    jobs: int = 0
    known: Sequence[Result] = ()
    overrides: Mapping[str, object] = field(default_factory=dict)
    resolved: dict[Spec, Resolved] = field(default_factory=dict)

    @property
    def jobs_at_a_time(self) -> int:
        """Runs of the check at a time."""
        on_gpu = self.setting.device == "cuda"
        return self.jobs or default_jobs(self.machine, on_gpu * self.setting.gpu_bytes)

    @functools.cached_property
    def device(self) -> Device:
        """What is calibrated."""
        return store.device(self.setting.device, self.machine)

    def stations(self, part: str) -> list[Station]:
        """The stations of a part here."""
        return stations_of(part, self.setting)

    def mark(self, station: Station) -> str:
        """What decides that a station's earlier outcome holds."""
        return mark_of(station, self.device, self.setting.small)

    def earlier(self, station: Station) -> Outcome | None:
        """The outcome of an earlier call that need not be repeated."""
        found = None if self.fresh else kept(station.part, station.name, self.folder)
        good = found is not None and found.status in DONE and found.mark == self.mark(station)
        return found if good else None

    def planned(self, station: Station, folder: Path) -> Planned:
        """A row's or a check's run, checked as far as that takes no process."""
        assert station.spec is not None
        return plan([self.resolved_of(station.spec)], folder, self.machine)[0]

    def resolved_of(self, spec: Spec) -> Resolved:
        """``spec`` with what follows from it, once."""
        if spec not in self.resolved:
            self.resolved[spec] = resolve(spec)
        return self.resolved[spec]


def clock(minutes: float | None) -> Budget:
    """A budget that begins now."""
    return Budget(minutes=minutes, now=time.monotonic, began=time.monotonic())
