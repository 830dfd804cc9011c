"""Predictions of many rows: a worker process computes them, and a folder caches them on disk.
Does not import torch; only the worker (``harness.planner.worker``) does."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import psutil

from harness import KEPT, ROOT, SET_UP
from harness.launch import command
from harness.planner import eager, records
from harness.planner.overhead import USUAL
from harness.planner.worker import DONE, none
from harness.prediction import Prediction, kept, read
from harness.resolve import Resolved
from harness.system import machine
from strategies.base import BadInput


class Worker:
    """The parent's side of ``harness.planner.worker``: requests go down one pipe, and finished rows
    come back through another, each as a line of JSON.
    ``reason`` and ``fault`` say why it ended early or did not start."""

    def __init__(self) -> None:
        self.reason = self.fault = ""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by end)
        asked, ask = os.pipe()
        heard, told = os.pipe()
        self._ask, self._heard = open(ask, "w", buffering=1), open(heard)  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None
        words = [sys.executable, "-m", "harness.planner.worker", str(asked), str(told)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = command.inherited() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        nothing = subprocess.DEVNULL
        streams = {"stdin": nothing, "stdout": nothing, "stderr": self._log}
        try:
            self._process = subprocess.Popen(
                words, cwd=ROOT, env=env, pass_fds=[asked, told], **streams
            )
        except OSError as error:
            self.reason, self.fault = "the predicting process could not be started", str(error)
        finally:
            os.close(asked)
            os.close(told)

    @property
    def runs(self) -> bool:
        """True if the worker can take requests."""
        return self._process is not None

    def ask(self, request: Mapping[str, Any]) -> Iterator[tuple[int, Prediction]]:
        """Yield (index, prediction) of each row of the request when it ends.
        The worker ends if the caller stops before the last row."""
        if self._process is None:
            return
        line = ""
        try:
            with contextlib.suppress(BrokenPipeError):  # a dead worker is reported below
                print(json.dumps(request), file=self._ask)
            for line in self._heard:
                if line == DONE:
                    return
                if line.endswith("\n"):  # else its writer died
                    index, found = json.loads(line)
                    yield index, read(found)
            self.reason = f"the predicting process ended with exit code {self._process.wait()}"
            self._log.seek(0)
            lines = (line.strip() for line in reversed(self._log.read().splitlines()))
            self.fault = next(filter(None, lines), "")[:200]
        finally:
            if line != DONE:
                self.end()

    def end(self) -> None:
        """Kill the worker."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for file in (self._ask, self._heard, self._log):
            with contextlib.suppress(BrokenPipeError):
                file.close()


_STANDING: ContextVar[list[Worker] | None] = ContextVar("standing", default=None)


@contextlib.contextmanager
def kept_workers() -> Iterator[None]:
    """Share one worker among all requests in this context, so that libraries are loaded once.
    If the worker dies, the next request starts another."""
    started: list[Worker] = []
    token = _STANDING.set(started)
    try:
        yield
    finally:
        _STANDING.reset(token)
        for one in started:
            one.end()


@contextlib.contextmanager
def worker() -> Iterator[Worker]:
    """Yield the shared worker, or one for this request alone."""
    started = _STANDING.get()
    if started is None:
        with kept_workers(), worker() as own:
            yield own
        return
    if not started or not started[-1].runs:
        started.append(Worker())
    yield started[-1]


TIMEOUT = 600.0
"""Seconds that one trace may take. A DiT-XL/2 under ZeRO-3 takes about 30."""
WORKER_BYTES = 2 * 2**30
"""Memory of one worker (torch, DeepSpeed and the recorded allocations); limits the number of
jobs."""


_FOLDER: ContextVar[Path | None] = ContextVar("folder", default=None)


def _usual_folder() -> Path:
    return KEPT / "predictions"


def default_folder() -> Path:
    """Return the folder in which ``plan`` caches predictions."""
    return _FOLDER.get() or _usual_folder()


def ships() -> bool:
    """Return True if predictions that ship with the project count."""
    return default_folder() == _usual_folder()


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Trace anew in this context: use no cached or recorded prediction of an earlier call.

    Raises:
        BadInput: nothing can be traced here.
    """
    if not traces():
        raise BadInput(f"fresh predictions are traced, which needs torch and accelerate; {SET_UP}")
    with tempfile.TemporaryDirectory() as folder:
        token = _FOLDER.set(Path(folder))
        try:
            yield
        finally:
            _FOLDER.reset(token)


def path_of(resolved: Resolved, folder: Path, kind: str = USUAL) -> Path:
    """Return the cache file of a prediction, which has its name (``records.name``)."""
    return folder / f"{records.name(resolved, kind)}.json"


def cached(resolved: Resolved, folder: Path, kind: str = USUAL) -> Prediction | None:
    """Return the prediction that an earlier call cached in ``folder``, or None.
    For ``plan``'s usual folder, a recorded prediction that ships with the project counts too."""
    plain = eager.of(resolved)
    found = kept(path_of(plain, folder, kind))
    if found is None and folder == _usual_folder():
        found = records.find(plain.spec.model, records.name(plain, kind))
    return eager.told(resolved, found) if found else None


def predict_all(
    rows: Sequence[Resolved],
    folder: Path,
    *,
    kind: str = USUAL,
    done: Callable[[int, Prediction], None] = lambda index, prediction: None,
    jobs: int | None = None,
    timeout: float = TIMEOUT,
) -> list[Prediction]:
    """Return the prediction of each row, in order, from the cache or a worker.
    ``kind``: the kind of card. ``done(index, prediction)`` is called when
    each ends. A recipe that fails raises nothing; its prediction has the reason. A compiled row has
    its eager row's (``harness.planner.eager``)."""
    given, rows = rows, [eager.of(row) for row in rows]
    found = {index: kept for index, row in enumerate(given) if (kept := cached(row, folder, kind))}
    for index, kept in found.items():
        done(index, kept)
    missing = [index for index in range(len(rows)) if index not in found]
    # A known prediction of a row with phases without them: they leave its step alone.
    steps = [cached(_without_phases(rows[i]), folder, kind) if rows[i].spec.phases else None
             for i in missing]  # fmt: skip
    for place, prediction in _each([rows[i] for i in missing], kind, jobs, timeout, steps):
        index = missing[place]
        _keep(prediction, path_of(rows[index], folder, kind))
        if rows[index].spec.phases and (not (step := steps[place]) or prediction.denoising):
            alone = dataclasses.replace(step or prediction, denoising=prediction.denoising)
            alone = dataclasses.replace(alone, asides={}, recorded="")
            _keep(alone, path_of(_without_phases(rows[index]), folder, kind))
        found[index] = eager.told(given[index], prediction)
        done(index, found[index])
    return [found[index] for index in range(len(rows))]


def _without_phases(row: Resolved) -> Resolved:
    """Return the row as one that counts its step alone."""
    return dataclasses.replace(row, spec=dataclasses.replace(row.spec, phases=""))


def default_jobs() -> int:
    """Return the number of parallel traces: one per core, limited by available memory."""
    return max(1, min(machine.cores(), psutil.virtual_memory().free // WORKER_BYTES))


def _keep(prediction: Prediction, path: Path) -> None:
    """Write a traced prediction to the cache. If the folder is not writable, nothing is cached."""
    if prediction.method == "trace":
        with contextlib.suppress(OSError):
            prediction.write(path)


def _each(
    rows: Sequence[Resolved],
    kind: str,
    jobs: int | None,
    limit: float,
    steps: Sequence[Prediction | None],
) -> Iterator[tuple[int, Prediction]]:
    """Yield (index, prediction) of each row when it ends; one worker predicts all.
    ``steps``: known predictions of rows without their phases."""
    left = []
    for index, row in enumerate(rows):
        if reason := f"refused: {row.refusal}" if row.refusal else untraceable(row):
            yield index, none(row, reason)
        else:
            left.append(index)
    if not left:
        return
    able = tuple(left)
    request = {
        "specs": [dataclasses.asdict(rows[i].spec) for i in able],
        "kinds": [kind] * len(able),
        "steps": [dataclasses.asdict(step) if (step := steps[i]) else None for i in able],
        "jobs": jobs or default_jobs(),
        "limit": limit,
    }
    with worker() as one:
        for place, made in one.ask(request):
            left.remove(able[place])
            yield able[place], made
    for index in left:
        yield index, none(rows[index], one.reason, one.fault)


def traces() -> bool:
    """Return whether this installation can trace; a light one plans from records alone."""
    return all(map(importlib.util.find_spec, ("torch", "accelerate")))


def untraceable(row: Resolved) -> str:
    """Return the missing package without which a row cannot be traced, and how to install it."""
    if not traces():
        return f"it is not recorded, and tracing it needs torch and accelerate; {SET_UP}"
    if "diffusers" in row.subject.needs and not importlib.util.find_spec("diffusers"):
        return "it is not recorded, and tracing it needs diffusers; pip install diffusers"
    return ""
