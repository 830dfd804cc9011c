"""Rows of one GPU each, several at a time on the GPUs of one machine: for their memory alone.

What a row's allocator holds does not depend on its neighbours; its time does, through power, heat,
cores and links, by more than suites compare. So such a row keeps no time: it is in no answer about
speed, and its place in a timed suite stays open. What may feel its neighbours in memory too
(offload to a host that they share, compilers, disks) is not run so; and no failure in company is
kept, but is found again alone.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from harness.resolve import Resolved
from harness.result import Result, Status
from harness.system.machine import Machine
from strategies.base import BadInput

__all__ = ["BesideError", "able", "places", "run_beside", "without_times"]

AWAY = frozenset(
    {"compiled", "moves_activations", "host_optimizer", "swapped_weights", "streams_weights"}
)
AWAY_NEEDS = frozenset({"cuda", "cpu_adam", "async_io", "inductor"})
"""Needs of what pages, offloads or compiles: a plain row on a GPU has none of them."""
KEPT = (Status.OK, Status.GPU_OOM)
"""Ends that neighbours on other GPUs cannot have caused."""
Row = Callable[..., Result]


class BesideError(BadInput):
    """Rows that cannot run side by side here: why, and what to leave out."""


def able(resolved: Resolved) -> bool:
    """Whether a row's memory is its own GPU's alone, on one process."""
    spec, engine = resolved.spec, resolved.launch.engine
    at_home = all(engine.place(what) == "device" for what in ("optimizer", "parameters"))
    hosted = any(getattr(part, "place", "") == "cpu" for part in resolved.recipe.strategies)
    plain = spec.device == "cuda" and spec.processes == 1 and not spec.recorded and not spec.world
    away = AWAY & resolved.launch.traits or AWAY_NEEDS & set(resolved.needs)
    return plain and at_home and not hosted and not away


def places(machine: Machine, at_once: int) -> list[str]:
    """A name for each of ``at_once`` GPUs, as CUDA_VISIBLE_DEVICES takes it.

    Raises:
        BesideError: there are not so many.
    """
    here = len(machine.gpus)
    if at_once < 2:
        raise BesideError(f"side_by_side is {at_once}; give --side-by-side at least 2")
    if here < at_once:
        more = f"give --side-by-side {here}" if here > 1 else "leave --side-by-side out"
        raise BesideError(f"side_by_side is {at_once}, and this machine has {here} GPUs; {more}")
    return [gpu.uuid or str(gpu.index) for gpu in machine.gpus[:at_once]]


def run_beside(
    rows: Sequence[Any], gpus: Sequence[str], start: Row, done: Callable[[Any, Result], None]
) -> None:
    """Run ``rows`` (``Planned``), one on each of ``gpus`` at a time; ``done`` is told of each that
    ended well, in this thread, as it ends. The others leave nothing, and are to be run alone.

    Args:
        start: runs a row's ``resolved`` in its ``folder``; takes ``added`` variables and ``stop``.

    Raises:
        KeyboardInterrupt: all that ran have been ended first.
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
            if result.status in KEPT:
                done(row, without_times(result, at_once))
            else:
                (row.folder / "result.json").unlink(missing_ok=True)


def _variables(gpu: str, at_once: int) -> dict[str, str]:
    """A GPU of its own, and a share of the cores."""
    threads = max(1, len(os.sched_getaffinity(0)) // at_once)
    return {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": str(threads)}


def without_times(result: Result, at_once: int) -> Result:
    """``result`` marked as measured in company, with its memory and without its times."""
    result.beside = at_once
    if result.launch:
        result.launch.others = []  # its neighbours, in no way of its memory
    for rank in result.ranks:
        rank.step_seconds, rank.warmup_seconds, rank.step_usage = [], [], None
    return result
