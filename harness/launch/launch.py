"""Launch of a resolved spec with ``accelerate launch``, under a deadline: a typed result."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness import ROOT, files, opened, result
from harness.json_files import BadFile, read_json
from harness.launch import outcome
from harness.launch.command import (
    HISTORY,
    PROFILE,
    command,
    display,
    environment,
    free_port,
    group_limit,
    inherited,
    left_in,
    on_loopback,
)
from harness.resolve import Resolved
from harness.result import LaunchRecord, Result
from harness.spec import Spec
from harness.system import machine, process, tree
from strategies import users_launch
from strategies.files import printable

Argv = Callable[[int], list[str]]
OnStatus = Callable[[dict[str, Any]], None]

TRIES = 3  # another process can take the port before the run does
STATUS_SECONDS = 0.5
LOG_BYTES = 1 << 20  # the end of the log suffices: tracebacks come last
PROBE_BYTES = 1 << 20
COMPILED = "compiled"
FILES = (
    *("ranks", "nvme", COMPILED, PROFILE, HISTORY.format("*")),
    *("result.json", "log.txt", "samples.png", users_launch.YAML, users_launch.JSON),
)
"""Names in a run's folder, which the next run there deletes."""
ENDS = ("result.json", "ranks/rank*.failure.json")
"""Files that end a run once one is there: its result, or a rank's failure."""


def run(
    resolved: Resolved,
    folder: Path,
    *,
    timeout: float | None,
    on_status: OnStatus = lambda status: None,
    more: Sequence[str] = (),
    argv: Argv | None = None,
    added: Mapping[str, str] = MappingProxyType({}),
    stop: Callable[[], str | None] = lambda: None,
) -> Result:
    """Run to the end, write ``folder/result.json`` and return it; ``timeout`` is in seconds.

    ``on_status`` gets phase, step and ``of`` (its steps) about twice a second. ``more`` are words
    for the worker; ``argv`` replaces the command (it gets the port), and ``added`` variables
    override the run's own. ``stop`` returns why the run has to end, or None.

    Raises:
        files.OutputError: the folder cannot be written, or the launcher cannot be started.
        process.Interrupted: Ctrl-C or SIGTERM; the row is written as interrupted first.
    """
    spec, folder, began = resolved.spec, Path(folder).absolute(), time.time()
    argv = argv or (lambda port: on_loopback(command(resolved, folder, port=port, more=more)))
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    # torch.compile's caches: a later run that found them would seem cheaper to compile.
    own = folder / COMPILED
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(own), "TRITON_CACHE_DIR": str(own / "triton")}
    for left in reversed(range(TRIES)):
        prepare(folder)
        file = resolved.launch.engine.file
        if not file.own:
            # A script reads batch, precision and clipping from its copy; a recipe sets them.
            script = "own_loop" in resolved.launch.traits
            users_launch.write(file if script else users_launch.opened(file), folder)
        tree.free_stale_locks()
        port, kills, interrupt = free_port(), machine.memory_kills(), None
        variables = {**inherited(), **group_limit(timeout), **environment(resolved), **added}
        try:
            ended = process.run_child(
                argv(port),
                cwd=ROOT,
                env=variables | caches,
                log=folder / "log.txt",
                timeout=timeout,
                on_tick=_ticker(folder, on_status),
                finished=lambda: any(itertools.chain(*map(folder.glob, ENDS))),
                stop=stop,
                scratch=(folder / "nvme", own),
            )
        except process.CannotStart as error:
            raise files.OutputError(f"cannot start {error.filename}: {error.strerror}") from None
        except process.Interrupted as signalled:
            ended, interrupt = signalled.ended, signalled
        facts = _facts(spec, folder, ended, timeout, machine.memory_kills().since(kills))
        if not (left and outcome.retryable(facts)):
            break
    row = _row(resolved, folder, facts, ended)
    row.command = display(resolved, folder, more)
    row.started = row.started or started
    row.inputs = opened.inputs(folder, began) if resolved.runs_users_code else None
    write(row, folder)
    if interrupt:
        raise interrupt
    return row


def _ticker(folder: Path, on_status: OnStatus) -> Callable[[int], None]:
    """Return a function that forwards the ranks' statuses about twice a second."""
    last = -STATUS_SECONDS

    def tick(tree_bytes: int) -> None:
        nonlocal last
        if time.monotonic() - last < STATUS_SECONDS:
            return
        last, statuses = time.monotonic(), rank_files(folder, "status")
        phase, step = outcome.where(outcome.Facts(statuses=statuses))
        totals = [s.get("of") or 0 for s in statuses if s.get("phase") == phase]
        loss = next((s["loss"] for s in statuses if s.get("loss") is not None), None)
        on_status({"phase": phase, "step": step, "of": max(totals, default=0), "loss": loss})

    return tick


def prepare(folder: Path) -> None:
    """Create the folder, delete an earlier run's files, and check that the disk has space."""
    with files.writing(folder):
        files.claim(folder, FILES)
        files.clear(folder, FILES)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0" * PROBE_BYTES)


def _facts(
    spec: Spec,
    folder: Path,
    ended: process.Ended,
    timeout: float | None,
    kills: machine.MemoryKills,
) -> outcome.Facts:
    finished = result.found(folder)
    return outcome.Facts(
        exit_code=ended.exit_code,
        signal=ended.signal,
        stopped=ended.stopped,
        timeout_seconds=timeout,
        result=finished.status if finished else None,
        result_reason=finished.reason if finished else None,
        result_way_out=finished.way_out if finished else None,
        failures=rank_files(folder, "failure"),
        statuses=rank_files(folder, "status"),
        log=read_log(folder / "log.txt"),
        machine_kills=kills.machine,
        group_kills=kills.group,
        group_limit_bytes=kills.limit_bytes,
        shell_limit=machine.shell_limit(),
        recipe=spec.recipe,
        processes=spec.processes,
    )


def _row(resolved: Resolved, folder: Path, facts: outcome.Facts, ended: process.Ended) -> Result:
    """Return the worker's own result, or a row that says how far the run came and why it ended."""
    row = result.found(folder)
    if row is None:
        phase, step = outcome.where(facts)
        peaks = [int(record.get("peak_bytes") or 0) for record in facts.statuses + facts.failures]
        row = Result.not_run(
            resolved,
            *outcome.classify(facts),
            phase=phase,
            step=step,
            peak_so_far_bytes=max(peaks, default=0) or None,
            log_tail=outcome.tail(facts.log),
            recordings=left_in(folder),
        )
    row.launch = LaunchRecord(
        exit_code=ended.exit_code if ended.signal is None else -ended.signal,
        wall_seconds=ended.wall_seconds,
        tree_peak_bytes=ended.tree_peak_bytes or None,
        killed=ended.stopped is not None,
        others=list(ended.others),
    )
    return row


def write(row: Result, folder: Path) -> None:
    """Write a row to its folder; raise ``files.OutputError`` if it fails."""
    with files.writing(folder):
        row.write(folder / "result.json")


def rank_files(folder: Path, kind: str) -> tuple[dict[str, Any], ...]:
    """Return the ranks' whole files of one ``kind``, in order of ranks."""
    records = []
    for path in (folder / "ranks").glob(f"rank*.{kind}.json"):
        with contextlib.suppress(BadFile):
            records.append(read_json(path, dict[str, Any]))
    return tuple(sorted(records, key=lambda data: data.get("rank") or 0))


def read_log(path: Path) -> str:
    """Return the end of a log in printable lines, for rows and reports; empty if there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - LOG_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
            return printable("\n".join(text.splitlines()))  # progress bars end in \r
    except OSError:
        return ""
