"""Many predictions: a process each, a few at a time, kept on disk. No torch in this process."""

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
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from harness import ROOT
from harness.launch import command
from harness.launch.sources import PREDICTED, digest
from harness.predict.attention import USUAL
from harness.predict.prediction import Prediction, load, none
from harness.resolve import Resolved
from harness.subjects import from_file
from harness.system import kernel
from harness.system.probe import version

__all__ = ["TIMEOUT", "cached", "code", "default_folder", "path_of", "predict_all"]

TIMEOUT = 600.0
"""Seconds that one prediction may take; a DiT-XL/2 under ZeRO-3 takes some thirty."""
WORKER_BYTES = 2 * 2**30
"""Memory of one worker, to choose how many run at a time: torch and DeepSpeed, and the books."""


def default_folder() -> Path:
    """Where ``plan`` keeps predictions."""
    return ROOT / "results" / "predictions"


def path_of(resolved: Resolved, folder: Path, kind: str = USUAL) -> Path:
    """The file of a prediction: named by the spec, the kind of card (``attention``), the code and
    the versions that made it."""
    place = kind if resolved.spec.device == "cuda" else "cpu"
    own = from_file.identity(resolved.spec.model) + resolved.subject.identity
    return folder / f"{resolved.spec.key}-{place}-{code()}{own}.json"


def cached(resolved: Resolved, folder: Path, kind: str = USUAL) -> Prediction | None:
    """The prediction that an earlier call kept in ``folder``; None where there is none."""
    return load(path_of(resolved, folder, kind))


@functools.cache
def code() -> str:
    """A short hash of the sources that decide a prediction, and of the libraries' versions."""
    versions = [str(version(name)) for name in ("torch", "accelerate", "deepspeed")]
    return hashlib.sha256("".join([digest(PREDICTED), *versions]).encode()).hexdigest()[:10]


def predict_all(
    rows: Sequence[Resolved],
    folder: Path,
    *,
    kind: str = USUAL,
    done: Callable[[int, Prediction], None] = lambda index, prediction: None,
    jobs: int | None = None,
    timeout: float = TIMEOUT,
) -> list[Prediction]:
    """A prediction each for a card of that ``kind``, in order; ``done`` is told of each as it
    ends, by its index.

    Never raises for a recipe: what fails is a prediction that says why.
    """
    predictions: dict[int, Prediction] = {}
    missing = []
    for index, resolved in enumerate(rows):
        kept = cached(resolved, folder, kind)
        if kept is None:
            missing.append(index)
        else:
            predictions[index] = kept
            done(index, kept)
    with ThreadPoolExecutor(jobs or default_jobs()) as pool:
        waiting = {pool.submit(_predict, rows[i], folder, kind, timeout): i for i in missing}
        try:
            for future in as_completed(waiting):
                predictions[waiting[future]] = future.result()
                done(waiting[future], future.result())
        except KeyboardInterrupt:
            for future in waiting:
                future.cancel()
            raise
    return [predictions[index] for index in range(len(rows))]


def default_jobs() -> int:
    """One prediction a core, as far as memory goes."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(kernel.cores(), pages // WORKER_BYTES))


def _predict(resolved: Resolved, folder: Path, kind: str, timeout: float) -> Prediction:
    """Run one worker; its prediction is kept if it is a trace."""
    if resolved.refusal:
        return none(resolved, f"refused: {resolved.refusal}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headroom-") as scratch:
        out = Path(scratch) / "prediction.json"
        reason, fault = _run(resolved, Path(scratch), out, kind, timeout)
        prediction = load(out)
    if prediction is None:
        return none(resolved, reason, fault)
    prediction = dataclasses.replace(prediction, seconds_taken=time.monotonic() - began)
    if prediction.method == "trace":
        # A folder that cannot be written costs the next plan its time, no more.
        with contextlib.suppress(OSError):
            prediction.write(path_of(resolved, folder, kind))
    return prediction


def _run(
    resolved: Resolved, scratch: Path, out: Path, kind: str, timeout: float
) -> tuple[str, str]:
    """Start the worker and wait; if there is no prediction, why, and what was raised or printed."""
    spec = scratch / "spec.json"
    spec.write_text(json.dumps(dataclasses.asdict(resolved.spec)), encoding="utf-8")
    words = [sys.executable, "-m", "harness.predict.worker", str(spec), str(out), kind]
    env = command.inherited() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()}
    try:
        ended = subprocess.run(
            words, cwd=ROOT, env=env, timeout=timeout, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return f"not done after {timeout:.0f} s", ""
    except OSError as error:
        return "its worker could not be started", str(error)
    last = next(iter(_lines(ended.stderr)), "")
    return f"its worker ended with exit code {ended.returncode}", last[:200]


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _lines(text: str) -> Iterator[str]:
    return (line.strip() for line in reversed(text.splitlines()) if line.strip())
