"""Run a suite: check every row first, then run row after row, and store each result at once."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import files, opened
from harness.files import OutputError
from harness.json_files import write_json
from harness.launch import launch
from harness.report.data.rows import label
from harness.resolve import Resolved, run_name
from harness.result import Result, Status, found
from harness.suite.file import Suite
from harness.suite.rows import identity
from harness.system.machine import Machine
from harness.system.requirements import notes, obstacle
from strategies.base import Reason
from strategies.files import NotOurs, lock_file

FREE_BYTES = 64 * 2**20
"""A suite's logs and results take a few MiB. With less space a run would fail on a full disk."""
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""Errors of a lock that another process holds; all others are the file system's."""
KEPT = (Status.OK, Status.VOID, Status.GPU_OOM)
"""Ends that another try would not change, with the same spec, code and machine."""
Start = Callable[..., Result]
"""Runs a row, with the arguments of ``launch.run``."""


class SuiteInterrupted(Exception):
    """Ctrl-C was pressed; ``results`` are of the rows that had ended."""

    def __init__(self, results: list[Result]) -> None:
        super().__init__("interrupted")
        self.results = results


class Planned(NamedTuple):
    """A row before it runs. ``status`` is None if it can run, else refused or unsupported."""

    resolved: Resolved
    folder: Path
    status: Status | None
    lack: Reason | None
    notes: list[str]


def plan(rows: Sequence[Resolved], out: Path, machine: Machine) -> list[Planned]:
    """Check each row before any process starts; repetitions of impossible rows are omitted."""
    planned = []
    for row in rows:
        lack = row.refusal or obstacle(row, machine)
        status = Status.REFUSED if row.refusal else Status.UNSUPPORTED if lack else None
        if lack:
            lack = dataclasses.replace(lack, hint=lack.hint or "take another recipe")
        if lack is None or not row.spec.repeat:
            folder = out / "runs" / run_name(row.spec)
            planned.append(Planned(row, folder, status, lack, notes(row, machine)))
    return planned


def run_suite(
    suite: Suite,
    planned: Sequence[Planned],
    out: Path,
    *,
    machine: Machine,
    progress: Any,
    fresh: bool = False,
    timeout: float | None = None,
    start: Start | None = None,
) -> list[Result]:
    """Run the unfinished rows; return one result per row, in order. Each is written when it ends.

    A row that did not end well is not repeated.

    Args:
        progress: receives the events (``harness.commands.progress.Progress``).
        fresh: repeat finished runs too.
        timeout: seconds a run may take; None takes the suite's.
        start: runs a row; None takes ``launch.run``. Several nodes need another one.

    Raises:
        OutputError: ``out`` cannot be written, is full, or another suite is writing to it.
        SuiteInterrupted: Ctrl-C; carries the results so far.
    """
    results: list[Result] = []
    check_out(out)
    with _alone(out):
        head: dict[str, Any] = {"name": suite.name, "title": suite.title}
        head |= {"reference": suite.reference, "started": _now(), "device": suite.device}
        head["order"] = [row.recipe for row in suite.rows]
        with files.writing(out):
            write_json(out / "suite.json", head)
        to_run = [must_run(row, machine, fresh) for row in planned]
        progress.begin_suite(suite.name, [label(row.resolved.spec) for row in planned], to_run)
        limit, start = timeout or suite.timeout_seconds, start or launch.run
        try:
            row = planned[0] if planned else None
            for row in planned:
                first = dataclasses.replace(row.resolved.spec, repeat=0)
                ends = [r.status for r in results if row.resolved.spec.repeat and r.spec == first]
                if lost := next((end for end in ends if end is not Status.OK), None):
                    progress.leave_out(label(row.resolved.spec), lost)
                    continue
                results.append(run_row(row, machine, progress, fresh, limit, start))
        except KeyboardInterrupt:
            if row is not None:
                results.extend(_interrupted_row(row, machine, results))
            raise SuiteInterrupted(results) from None
        finally:
            progress.stop()
    return results


def run_row(
    row: Planned,
    machine: Machine,
    progress: Any,
    fresh: bool,
    timeout: float,
    start: Start,
) -> Result:
    """Return the result of one row: an earlier one, one that is not run, or a new one.

    It is written to the row's folder.
    """
    mark = identity(row.resolved, machine)
    earlier = None if fresh else _finished(row, mark)
    if earlier is not None:
        progress.skip(earlier)
        return earlier
    if row.status is not None and row.lack is not None:
        result = Result.not_run(
            row.resolved,
            row.status,
            row.lack.text,
            row.lack.hint,
            command=launch.display(row.resolved, row.folder),
            started=_now(),
        )
        progress.skip(result)
    else:
        progress.begin_run(label(row.resolved.spec), timeout)
        result = start(row.resolved, row.folder, timeout=timeout, on_status=progress.status)
        progress.end_run(result)
    result.meter_notes += [n for n in row.notes if n not in result.meter_notes]
    # A worker that died has not recorded its machine.
    result.environment = result.environment or seen(row.resolved.spec.device, machine)
    result.identity = mark
    launch.write(result, row.folder)
    return result


def must_run(row: Planned, machine: Machine, fresh: bool) -> bool:
    """Return whether a row can run and has no earlier result that suffices (``run_row``)."""
    if row.status is not None:
        return False
    return fresh or _finished(row, identity(row.resolved, machine)) is None


def _finished(row: Planned, mark: str) -> Result | None:
    """Return the earlier result of the same spec, code and environment, if it need not be repeated.

    One of a user's code suffices if no file has changed that the code opened.
    """
    result = found(row.folder)
    if result is None or result.identity != mark or result.status not in KEPT:
        return None
    stale = row.resolved.runs_users_code and not opened.unchanged(result.inputs)
    return None if stale else result


def _interrupted_row(row: Planned, machine: Machine, known: Sequence[Result]) -> list[Result]:
    """Return the row that was running if the launcher wrote its state, or if it had just ended.

    A result with another identity is from an earlier run and does not count.
    """
    if any(result.spec == row.resolved.spec for result in known):
        return []
    if (result := found(row.folder)) is None:
        return []
    if result.identity:
        return [result] if result.identity == identity(row.resolved, machine) else []
    if result.status is not Status.INTERRUPTED:  # it ended while the signal arrived
        result.identity = identity(row.resolved, machine)
        launch.write(result, row.folder)
    return [result]


def seen(device: str, machine: Machine) -> dict[str, Any]:
    """Return the facts about the machine that need no worker."""
    facts: dict[str, Any] = {
        "versions": machine.versions,
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "device": device,  # or the GPU's name, below
    }
    if machine.container_bytes:
        facts["container_bytes"] = machine.container_bytes
    if device == "cuda" and machine.gpus:
        least = min(machine.gpus, key=lambda gpu: gpu.total_bytes)
        facts |= {"device": least.name, "device_bytes": least.total_bytes}
    return facts


# ---- results folder ----


def check_out(out: Path, names: Sequence[str] = files.RESULTS, *, force: bool = False) -> None:
    """Create ``out``, claim ``names`` in it (``files.claim``), and write a test file.

    Raises:
        OutputError: it cannot be created or written, or its disk is nearly full.
        files.Taken: a file of these names is not Headroom's.
    """
    with files.writing(out):
        files.claim(out, names, force=force)
        with tempfile.TemporaryFile(dir=out) as stream:
            stream.write(b"x")
        free = shutil.disk_usage(out).free
    if free < FREE_BYTES:
        text = f"{out}: {free / 2**20:.0f} MiB free, results need {FREE_BYTES // 2**20}"
        raise OutputError(f"{text}; free disk space or choose another --out")


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Lock ``out`` for one suite, because two would disturb each other's measurements.

    On a file system without locks (some network mounts) print a warning and continue.
    """
    import fcntl

    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(lock_file(out / ".lock"))
        except NotOurs as error:
            text = f"{out / '.lock'}: {error}; remove it, or choose another --out"
            raise OutputError(text) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                text = f"another run is writing to {out}; wait or choose another --out"
                raise OutputError(text) from None
            text = f"{out} cannot be locked ({error.strerror}): a second run there goes unnoticed"
            print(f"headroom: {text}", file=sys.stderr)
        yield


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
