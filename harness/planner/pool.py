"""Many predictions: by a process beside this one, a few at a time, kept on disk. No torch here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

from harness import ROOT
from harness.launch import command
from harness.launch.sources import PREDICTED, digest
from harness.planner.overhead import USUAL
from harness.planner.prediction import Prediction, kept, none
from harness.resolve import Resolved
from harness.subjects import own_module
from harness.system import machine
from harness.system.probe import version
from harness.system.process import scratch_folder
from strategies.distillation import files

# ---- workers ----
# The process beside this one that predicts (``harness.planner.worker``), as its parent sees it: it
# is told of request after request, and tells which rows are done. No torch here.


DONE = "done"
"""What a worker says behind the rows of a request."""


class Worker:
    """A process that predicts. ``reason`` and ``fault`` say why it ended early, or never began."""

    def __init__(self) -> None:
        self.reason = self.fault = ""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by end)
        asked, ask = os.pipe()
        heard, told = os.pipe()
        self._ask, self._heard = open(ask, "w", buffering=1), open(heard)  # noqa: SIM115
        self._process = self._start(asked, told)

    @property
    def runs(self) -> bool:
        """Whether it can be asked."""
        return self._process is not None

    def ask(self, file: Path) -> Iterator[int]:
        """The index of each row of the request in ``file``, as it is written. Whoever does not hear
        the last ends the worker."""
        if self._process is None:
            return
        heard = False
        try:
            with contextlib.suppress(BrokenPipeError):  # it has died: said below
                print(file, file=self._ask)
            for line in self._heard:
                heard = line.strip() == DONE
                if heard:
                    return
                yield int(line)
            self._died(self._process.wait())
        finally:
            if not heard:
                self.end()

    def end(self) -> None:
        """End it, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for file in (self._ask, self._heard, self._log):
            with contextlib.suppress(BrokenPipeError):
                file.close()

    def _died(self, code: int) -> None:
        self._log.seek(0)
        lines = (line.strip() for line in reversed(self._log.read().splitlines()))
        self.reason = f"its worker ended with exit code {code}"
        self.fault = next(filter(None, lines), "")[:200]

    def _start(self, asked: int, told: int) -> subprocess.Popen[bytes] | None:
        words = [sys.executable, "-m", "harness.planner.worker", str(asked), str(told)]
        env = command.inherited() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": self._log}
        try:
            return subprocess.Popen(words, cwd=ROOT, env=env, pass_fds=[asked, told], **streams)
        except OSError as error:
            self.reason, self.fault = "its worker could not be started", str(error)
            return None
        finally:
            os.close(asked)
            os.close(told)


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


# ---- one for many requests ----

_STANDING: ContextVar[list[Worker] | None] = ContextVar("standing", default=None)


@contextlib.contextmanager
def standing() -> Iterator[None]:
    """While it lasts one worker is asked all, so that libraries are loaded once; where it dies, the
    next request starts another."""
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
    """The worker that stands, or one for this request alone."""
    started = _STANDING.get()
    if started is None:
        with standing(), worker() as own:
            yield own
        return
    if not started or not started[-1].runs:
        started.append(Worker())
    yield started[-1]


TIMEOUT = 600.0
"""Seconds that one trace may take; a DiT-XL/2 under ZeRO-3 takes some thirty."""
WORKER_BYTES = 2 * 2**30
"""Memory of one worker, to choose how many run at a time: torch and DeepSpeed, and the books."""


def default_folder() -> Path:
    """Where ``plan`` keeps predictions."""
    return ROOT / "results" / "predictions"


def path_of(resolved: Resolved, folder: Path, kind: str = USUAL) -> Path:
    """The file of a prediction: named by the spec, the kind of card (``attention``), the code and
    the versions that made it, and by what is in files that a part of the recipe reads."""
    place = kind if resolved.spec.device == "cuda" else "cpu"
    own = own_module.identity(resolved.spec.model) + resolved.subject.identity
    own += _of_files(resolved)
    return folder / f"{resolved.spec.key}-{place}-{code()}{own}.json"


def _of_files(resolved: Resolved) -> str:
    """A short hash of the shapes and types in the files that the recipe reads (a teacher): all that
    a prediction takes of them, so that a teacher trained anew in its size keeps it. Empty where the
    recipe reads none. A spec's own weights have the shapes of its model, or are refused."""
    names = [name for part in resolved.recipe.strategies for name in part.reads()]
    headers = [files.header(name) for name in names]
    return hashlib.sha256(b"".join(headers)).hexdigest()[:8] if headers else ""


def cached(resolved: Resolved, folder: Path, kind: str = USUAL) -> Prediction | None:
    """The prediction that an earlier call kept in ``folder``; None where there is none."""
    return kept(path_of(resolved, folder, kind))


@functools.cache
def code() -> str:
    """A short hash of the sources that decide a prediction, and of the libraries' versions."""
    versions = [str(version(name)) for name in ("torch", "accelerate", "deepspeed")]
    return hashlib.sha256("".join([digest(PREDICTED), *versions]).encode()).hexdigest()[:10]


def predict_all(
    rows: Sequence[Resolved],
    folder: Path,
    *,
    kind: str | Sequence[str] = USUAL,
    done: Callable[[int, Prediction], None] = lambda index, prediction: None,
    jobs: int | None = None,
    timeout: float = TIMEOUT,
) -> list[Prediction]:
    """A prediction each for a card of that ``kind`` (or each for its own), in order; ``done`` is
    told of each as it ends, by its index.

    Never raises for a recipe: what fails is a prediction that says why.
    """
    predictions: dict[int, Prediction] = {}
    missing, kinds = [], [kind] * len(rows) if isinstance(kind, str) else kind
    for index, resolved in enumerate(rows):
        kept = cached(resolved, folder, kinds[index])
        if kept is None:
            missing.append(index)
        else:
            predictions[index] = kept
            done(index, kept)
    asked = [rows[i] for i in missing], [kinds[i] for i in missing]
    for place, prediction in _each(*asked, jobs, timeout):
        index = missing[place]
        _keep(prediction, path_of(rows[index], folder, kinds[index]))
        predictions[index] = prediction
        done(index, prediction)
    return [predictions[index] for index in range(len(rows))]


def default_jobs() -> int:
    """One prediction a core, as far as memory goes."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(machine.cores(), pages // WORKER_BYTES))


def _keep(prediction: Prediction, path: Path) -> None:
    """Keep a trace. A folder that cannot be written costs the next plan its time, no more."""
    if prediction.method == "trace":
        with contextlib.suppress(OSError):
            prediction.write(path)


def _each(
    rows: Sequence[Resolved], kinds: Sequence[str], jobs: int | None, timeout: float
) -> Iterator[tuple[int, Prediction]]:
    """(index, prediction) of each row, for a card of its kind, as it ends, by one worker."""
    refused = [(i, row.refusal) for i, row in enumerate(rows) if row.refusal]
    for index, refusal in refused:
        yield index, none(rows[index], f"refused: {refusal}")
    able = [i for i, row in enumerate(rows) if not row.refusal]
    if not able:
        return
    with scratch_folder() as scratch:
        asked = [rows[i] for i in able], scratch, [kinds[i] for i in able]
        run = Run(*asked, jobs or default_jobs(), timeout)
        told = set()
        for index in run.ended():
            found = kept(run.out(index))
            if found:
                told.add(index)
                yield able[index], found
    for index in set(range(len(able))) - told:
        yield able[index], none(rows[able[index]], run.reason, run.fault)


@dataclasses.dataclass
class Run:
    """One request: what it is of, and why the worker ended where predictions are missing."""

    rows: Sequence[Resolved]
    scratch: Path
    kinds: Sequence[str]
    jobs: int
    limit: float
    reason: str = ""
    fault: str = ""

    def out(self, index: int) -> Path:
        """Where the worker writes a prediction."""
        return self.scratch / f"{index}.json"

    def ended(self) -> Iterator[int]:
        """The index of each row whose prediction is written."""
        asked = {
            "specs": [dataclasses.asdict(row.spec) for row in self.rows],
            "out": [str(self.out(i)) for i in range(len(self.rows))],
            **{name: getattr(self, name) for name in ("kinds", "jobs", "limit")},
        }
        file = self.scratch / "asked.json"
        file.write_text(json.dumps(asked), encoding="utf-8")
        with worker() as one:
            yield from one.ask(file)
            self.reason, self.fault = one.reason, one.fault
