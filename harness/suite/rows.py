"""Rows of a suite: parallel rows, repetitions of the reference, and identities of measurements.

Parallel rows run on one GPU each, several at a time on one machine, for memory results only. A
row's allocator does not depend on its neighbours. Its time does, through power, heat, cores and
links, by more than the differences that suites compare. So a parallel row stores no times. It takes
part in no speed comparison, and a timed suite still runs it.

Rows whose memory may depend on neighbours too (offload to a shared host, compilers, disks) do not
run in parallel. A failure in parallel is not kept; the row runs again alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from harness import ROOT, opened
from harness.launch.sources import MEASURED, digest
from harness.resolve import Resolved
from harness.result import Result, Status
from harness.spec import Spec
from harness.subjects import own_module
from harness.suite.file import SuiteError
from harness.system import machine as kernel
from harness.system.machine import Machine
from harness.system.probe import version

AWAY = frozenset(
    {"compiled", "moves_activations", "host_optimizer", "swapped_weights", "streams_weights"}
)
AWAY_NEEDS = frozenset({"cuda", "cpu_adam", "async_io", "inductor"})
"""Needs of parts that page, offload or compile; a plain GPU row has none of them."""
KEPT = (Status.OK, Status.GPU_OOM)
"""Ends that neighbours on other GPUs cannot have caused."""
Row = Callable[..., Result]


def able(resolved: Resolved) -> bool:
    """Return whether a row has one process whose memory is all on its own GPU."""
    spec, engine = resolved.spec, resolved.launch.engine
    at_home = all(engine.place(what) == "device" for what in ("optimizer", "parameters"))
    hosted = any(getattr(part, "place", "") == "cpu" for part in resolved.recipe.strategies)
    plain = spec.device == "cuda" and spec.processes == 1 and not spec.recorded and not spec.world
    away = AWAY & resolved.launch.traits or AWAY_NEEDS & set(resolved.needs)
    return plain and at_home and not hosted and not away


def places(machine: Machine, at_once: int) -> list[str]:
    """Return a name for each of ``at_once`` GPUs, for CUDA_VISIBLE_DEVICES.

    Raises:
        SuiteError: there are not so many.
    """
    here = len(machine.gpus)
    if at_once < 2:
        raise SuiteError(f"side_by_side is {at_once}; give --side-by-side at least 2")
    if here < at_once:
        more = f"give --side-by-side {here}" if here > 1 else "leave --side-by-side out"
        raise SuiteError(f"side_by_side is {at_once}, and this machine has {here} GPUs; {more}")
    return [gpu.uuid or str(gpu.index) for gpu in machine.gpus[:at_once]]


def run_beside(
    rows: Sequence[Any], gpus: Sequence[str], start: Row, done: Callable[[Any, Result], None]
) -> None:
    """Run ``rows`` (``Planned``), one on each of ``gpus`` at a time.

    Call ``done`` in this thread for each row that ended well, when it ends. The others leave no
    result and have to run alone.

    Args:
        start: runs a row's ``resolved`` in its ``folder``; takes ``added`` variables and ``stop``.

    Raises:
        KeyboardInterrupt: after all running rows have been ended.
    """
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for gpu in gpus:
        free.put(gpu)
    over = threading.Event()

    def one(row: Any) -> Result | None:
        if over.is_set():
            return None
        gpu = free.get()
        try:
            added = _variables(gpu, len(gpus))
            stop = lambda: "interrupted" if over.is_set() else None  # noqa: E731
            return start(row.resolved, row.folder, added=added, stop=stop)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(len(gpus)) as pool:
        running = {pool.submit(one, row): row for row in rows}
        try:
            _collect(running, len(gpus), done)
        except KeyboardInterrupt:
            over.set()
            raise


def _collect(
    running: Mapping[Future[Result | None], Any], at_once: int, done: Callable[[Any, Result], None]
) -> None:
    left = set(running)
    while left:
        ended, left = wait(left, return_when=FIRST_COMPLETED)
        for future in ended:
            result, row = future.result(), running[future]
            if result is None:  # interrupted before it began
                continue
            if result.status in KEPT:
                done(row, without_times(result, at_once))
            else:
                (row.folder / "result.json").unlink(missing_ok=True)


def _variables(gpu: str, at_once: int) -> dict[str, str]:
    """Return variables that give a row one GPU and a share of the cores."""
    threads = max(1, len(os.sched_getaffinity(0)) // at_once)
    return {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": str(threads)}


def without_times(result: Result, at_once: int) -> Result:
    """Remove the times from ``result``, and mark it as one of ``at_once`` parallel rows."""
    result.beside = at_once
    if result.launch:
        result.launch.others = []  # its neighbours, which do not affect its memory
    for rank in result.ranks:
        rank.step_seconds, rank.warmup_seconds, rank.step_usage = [], [], None
    return result


# ---- repeats of the reference ----


def with_reference_again(specs: Sequence[Spec], reference: str, times: int) -> list[Spec]:
    """Return ``specs`` with repetitions of the reference row, so that it is measured ``times``
    times.

    They are spread evenly over the suite, and the last one is at its end, so that the machine's
    drift shows between them. Only ``repeat`` distinguishes each run from the first.

    If several rows have that recipe, the row that is comparable with most others is repeated.
    Nothing is added for a row without a comparable row, for a simulated world, which has no times,
    or for recorded runs, which are not ranked.

    Args:
        reference: the recipe of the suite's reference row.
        times: 1 adds nothing; ``--repeat`` counts.

    Raises:
        SuiteError: ``times`` is below 1.
    """
    if times < 1:
        raise SuiteError(f"noise_floor is {times}; give --noise-floor at least 1 (1: no floor)")
    row = _reference(specs, reference)
    if row is None or row.world or row.recorded or len(_compared(row, specs)) < 2:
        return list(specs)
    there = sum(dataclasses.replace(spec, repeat=0) == row for spec in specs)
    return _spread(list(specs), row, there, times - there)


def _spread(specs: list[Spec], row: Spec, there: int, more: int) -> list[Spec]:
    """Insert ``row`` ``more`` times after its first run, at equal distances."""
    first = specs.index(row) + 1
    others, end = specs[first:], specs[:first]
    for index in range(more):
        taken = round(len(others) / (more - index))
        end += [*others[:taken], dataclasses.replace(row, repeat=there + index)]
        others = others[taken:]
    return end + others


def _reference(specs: Sequence[Spec], recipe: str) -> Spec | None:
    named = [spec for spec in specs if spec.recipe == recipe and spec.repeat == 0]
    return max(named, key=lambda spec: len(_compared(spec, specs)), default=None)


def _compared(row: Spec, specs: Sequence[Spec]) -> set[Spec]:
    """Return the rows with the same work, itself among them; they are ranked together."""
    work = _work(row)
    return {dataclasses.replace(spec, repeat=0) for spec in specs if _work(spec) == work}


def _work(spec: Spec) -> Spec:
    """Return a spec without the fields in which rows of one ranking may differ."""
    return dataclasses.replace(spec, recipe="", processes=1, nodes=1, repeat=0)


# ---- identity ----
# A result with the same identity need not be measured again.


DECISIVE = ("PYTORCH_", "TORCH_CUDNN", "NVIDIA_TF32", "CUDA_LAUNCH", "NCCL_", "MKL_", "ONEDNN_")
"""Prefixes of the caller's variables that affect a measurement."""
DRIVER = Path("/proc/driver/nvidia/version")


def identity(resolved: Resolved, machine: Machine) -> str:
    """Return a hash of everything that affects a measurement."""
    from harness.data.feed import stamp

    spec = resolved.spec
    facts: list[Any] = [spec.key, stamp(spec.data), digest(MEASURED), platform.python_version()]
    facts += [machine.versions, own_module.identity(resolved.own_model)]
    facts += [resolved.subject.identity, version("diffusers")]
    facts += _file(spec.weights)
    facts += [
        told for part in resolved.recipe.strategies for n in part.reads() for told in _file(n)
    ]
    facts.append(sorted((k, v) for k, v in os.environ.items() if k.startswith(DECISIVE)))
    return hashlib.sha256(json.dumps([*facts, _devices(spec, machine)]).encode()).hexdigest()[:16]


def _file(name: str) -> list[Any]:
    """Return the digest of the file; empty if it does not exist."""
    path = ROOT / name
    return [opened.digest(path)] if name and path.exists() else []


def _devices(spec: Spec, machine: Machine) -> list[Any]:
    cpu = [platform.machine(), kernel.cpu_name(), machine.cores]
    if spec.device != "cuda":
        return cpu
    driver = DRIVER.read_text(encoding="utf-8").splitlines()[:1] if DRIVER.exists() else []
    return [*cpu, *machine.device_names, *driver]
