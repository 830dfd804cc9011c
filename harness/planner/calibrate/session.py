"""One call of ``calibrate``: its folder, options and earlier outcomes; and parallel runs of the
check.
"""

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
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

# ---- parallel runs ----
# Only the outcome of each run counts, not its time.


PROCESS_BYTES = 3 * 2**30
"""Host memory of one process of a small model, with its libraries."""
GPU_BYTES = 6 * 2**30
"""GPU memory of the same process, with its context; a run has a process on each GPU."""
MOST = 8
TERM_SECONDS = 20.0
Ended = Callable[[Planned, Result | None, str], None]
"""Called for each row with its result, or with None and the reason that it did not start."""


def default_jobs(machine: Machine, gpu_bytes: int) -> int:
    """Return the number of runs at a time, by cores, host memory and GPU memory.

    A run has two processes. ``gpu_bytes`` is 0 if runs use the CPU.
    """
    limits = [MOST, max(2, machine.cores // 2), machine.memory_bytes // (2 * PROCESS_BYTES)]
    if gpu_bytes:
        limits.append(gpu_bytes // GPU_BYTES)
    return max(1, min(limits))


@dataclasses.dataclass
class Together:
    """A pool of runs. ``lacks`` returns why no further row may start; empty if one may."""

    machine: Machine
    timeout: float
    lacks: Callable[[], str]
    ended: Ended
    fresh: bool = False
    children: set[subprocess.Popen[bytes]] = dataclasses.field(default_factory=set)
    stopped: bool = False

    def run(self, rows: Sequence[Planned], jobs: int) -> None:
        """Run all rows; results of earlier calls count.

        Raises:
            KeyboardInterrupt: Ctrl-C; the active runs have ended.
        """
        turn = threading.Lock()  # report one row at a time
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
        except Exception as error:  # for example a full disk; other rows continue
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
        (row.folder / "result.json").unlink(missing_ok=True)  # remove the result of an older run
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
        if self.stopped:  # stopped while this child started
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
        """Send SIGTERM to the children, and wait some seconds while each ends its own processes."""
        children = list(self.children)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + TERM_SECONDS
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, deadline - time.monotonic()))


def _finished(folder: Path, mark: str) -> Result | None:
    """Return the earlier result of the same spec, code and machine if it needs no repetition."""
    try:
        result = load(folder / "result.json")
    except BadResult:
        return None
    return result if result.identity == mark and result.status in KEPT else None


def _not_run(row: Planned, machine: Machine) -> Result:
    """Return the result of a row that this machine cannot run."""
    spec = row.resolved.spec
    return Result(
        status=row.status or Status.UNSUPPORTED,
        spec=spec,
        reason=row.lack.text if row.lack else "",
        way_out=row.lack.hint if row.lack else "",
        environment=seen(spec.device, machine),
    )


def _lost(row: Planned, code: int | None) -> Result:
    return _failed(row, f"the launcher ended with exit code {code} and wrote no result")


def _failed(row: Planned, reason: str) -> Result:
    return Result(status=Status.FAILED, spec=row.resolved.spec, reason=reason)


@dataclass
class Session:
    """One call's folder, options and state.

    ``tell`` prints a line that stays. ``live`` shows a line while work goes on: its name, and the
    seconds that it usually takes. ``jobs``: runs of the check at a time (0: as many as fit).
    ``known``: earlier results of this device, which also calibrate predictions.
    """

    folder: Path
    machine: Machine
    setting: Setting
    budget: Budget
    tell: Callable[[str], None]
    live: Callable[[str, float], AbstractContextManager[Any]]
    fresh: bool = False
    jobs: int = 0
    known: Sequence[Result] = ()
    overrides: Mapping[str, object] = field(default_factory=dict)
    resolved: dict[Spec, Resolved] = field(default_factory=dict)

    @property
    def jobs_at_a_time(self) -> int:
        """The runs of the check at a time."""
        on_gpu = self.setting.device == "cuda"
        return self.jobs or default_jobs(self.machine, on_gpu * self.setting.gpu_bytes)

    @functools.cached_property
    def device(self) -> Device:
        """The device to calibrate."""
        return store.device(self.setting.device, self.machine)

    def stations(self, part: str) -> list[Station]:
        """Return the stations of a part on this machine."""
        return stations_of(part, self.setting)

    def mark(self, station: Station) -> str:
        """Return the hash that decides if a station's earlier outcome is valid."""
        return mark_of(station, self.device, self.setting.small)

    def earlier(self, station: Station) -> Outcome | None:
        """Return the outcome of an earlier call that needs no repetition, or None."""
        found = None if self.fresh else kept(station.part, station.name, self.folder)
        good = found is not None and found.status in DONE and found.mark == self.mark(station)
        return found if good else None

    def planned(self, station: Station, folder: Path) -> Planned:
        """Return the run of a row or a check, with all checks that need no process."""
        assert station.spec is not None
        return plan([self.resolved_of(station.spec)], folder, self.machine)[0]

    def resolved_of(self, spec: Spec) -> Resolved:
        """Return ``spec`` resolved, and cache it."""
        if spec not in self.resolved:
            self.resolved[spec] = resolve(spec)
        return self.resolved[spec]


def clock(minutes: float | None) -> Budget:
    """Return a budget that starts now."""
    return Budget(minutes=minutes, now=time.monotonic, began=time.monotonic())
