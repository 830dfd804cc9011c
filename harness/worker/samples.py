"""Background samples of a run: device memory, kernel counts of a step, GPU state and the heap.

The caching allocator keeps maxima of its own counts. The driver's count (context, communication
buffers, temporary workspaces of libraries) has no maximum, so a thread samples it in untimed
phases.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from harness.launch.command import ALLOCATOR
from harness.result import GpuSample, StepUsage
from harness.system import gpus
from harness.system.machine import busy_now

INTERVAL = 0.005
"""Seconds between two reads. A read takes some microseconds; a collective's buffer lives longer."""


class Highest:
    """Maximum of the values that ``read`` returned since ``reset``, at each ``look`` and, from
    ``start`` until ``stop``, in a thread. A failed read (a lost device) has no value."""

    def __init__(self, read: Callable[[], int]) -> None:
        self.read, self.value = read, 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def reset(self) -> None:
        """Restart with the current value."""
        self.value = 0
        self.look()

    def look(self) -> int:
        """Read once and return the maximum so far."""
        with contextlib.suppress(RuntimeError):
            self.value = max(self.value, self.read())
        return self.value

    @property
    def running(self) -> bool:
        """Return whether the thread runs."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread if it does not run."""
        if self._thread is None:
            self._over.clear()
            # A daemon thread, so that a worker that fails during a phase can still exit.
            self._thread = threading.Thread(target=self._watch, name="memory sampler", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        while not self._over.wait(INTERVAL):
            self.look()


# ---- kernel counts of a step ----
# They are read before the clock starts and after it has stopped. ``harness.report.figures.floor``
# derives from them whether other processes used the cores.


class Counts(NamedTuple):
    """Counts of this process with all its threads (getrusage(2)), and of the cores that it may
    use."""

    cpu_seconds: float
    forced_switches: int
    minor_faults: int
    busy_seconds: float

    def __sub__(self, other: Counts) -> Counts:
        return Counts._make(a - b for a, b in zip(self, other, strict=True))


def now() -> Counts:
    """Return the counts since the start of the process, and of the machine."""
    used, busy = resource.getrusage(resource.RUSAGE_SELF), busy_now()
    cpu = used.ru_utime + used.ru_stime
    return Counts(cpu, used.ru_nivcsw, used.ru_minflt, busy)


def as_usage(steps: list[Counts]) -> StepUsage:
    """Return the counts of some steps as one list per count."""
    columns = zip(*steps, strict=True) if steps else ([],) * len(Counts._fields)
    named = dict(zip(Counts._fields, map(list, columns), strict=True))
    return StepUsage(cores=len(os.sched_getaffinity(0)), **named)


# ---- GPU state ----
# nvidia-smi takes a good part of a second, so no timed step overlaps with it. It starts before a
# settling step, to sample a device at work, and must end before the next step. It starts again
# after the last timed step, and must end before the run does.


class GpuWatch:
    """Background samples of the first ``count`` GPUs: clocks, throttling and other processes.

    One rank samples all GPUs. On the other ranks ``count`` is 0 and nothing happens.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._asked: list[Future[list[GpuSample]]] = []

    def begin(self, when: str) -> None:
        """Sample in the background; call ``end`` before the next timed step."""
        self.end()
        if self.count:
            pool = ThreadPoolExecutor(1)
            self._asked.append(pool.submit(gpus.sample, when, self.count))
            pool.shutdown(wait=False)

    def end(self) -> None:
        """Wait for a pending sample."""
        wait(self._asked)

    def samples(self) -> list[GpuSample]:
        """Return all samples, after a wait for a pending one."""
        return [sample for asked in self._asked for sample in asked.result()]


# ---- heap of a CPU process ----
# A CPU run starts with ``launch.command.ALLOCATOR`` in its environment, so that resident memory
# follows live tensors. Each step then faults all its pages in again, which costs a third of some
# steps and more of others. Real trainings do not run so. After memory is measured, ``keep_freed``
# applies the final state of glibc's dynamic rule (malloc(3), mallopt(3)). That rule raises its
# threshold to the largest block that was mapped and freed, up to 32 MiB, and trims the heap's top
# above twice that.


MIB = 2**20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""mallopt's parameter numbers, from <malloc.h>."""
KEPT = {M_MMAP_THRESHOLD: 32 * MIB, M_TRIM_THRESHOLD: 64 * MIB}
"""Final values of glibc's dynamic thresholds on 64 bits: DEFAULT_MMAP_THRESHOLD_MAX, and twice
that.

Below them, a block that each step allocates comes from the heap, as under the dynamic rule. Larger
blocks are mapped under both.
"""


def keep_freed() -> bool:
    """Let the heap keep freed blocks from now on, as glibc's does by default.

    Return whether that changed anything. A process that started without ``ALLOCATOR`` has glibc's
    own rule already, and a process without glibc has no such settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    gives_back = all(os.environ.get(name) == value for name, value in ALLOCATOR.items())
    if mallopt is None or not gives_back:
        return False
    return all([mallopt(name, value) for name, value in KEPT.items()])
