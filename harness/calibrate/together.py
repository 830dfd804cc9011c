"""Runs of the catalog, several at a time: whether each ends well matters, and no time of theirs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import ROOT
from harness.result import BadResult, Result, Status, load
from harness.suite.identity import identity
from harness.suite.run import KEPT, Planned, seen
from harness.system.machine import Machine

__all__ = ["Ended", "Together", "default_jobs"]

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
            [sys.executable, "-m", "harness.calibrate.one", *words],
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
