"""The most that a device's own count of used bytes shows while something runs.

The caching allocator keeps maxima of its own counts; what the driver counts (context, communication
buffers, workspaces that libraries take and give back) has none, and must be looked at meanwhile. A
thread does that, in phases whose steps are not timed.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
from collections.abc import Callable
from typing import NamedTuple

from harness.launch.command import ALLOCATOR
from harness.phases import PEAK_PHASES
from harness.result import GpuSample, StepUsage
from harness.system import gpu_state
from harness.system.machine import busy_now

INTERVAL = 0.005
"""Seconds between two looks: a look takes some microseconds, a collective's buffer lives longer."""
TIMED = ("steady",)


def is_sampled(phase: str) -> bool:
    """Whether a thread may look while this phase runs: not while steps are timed."""
    return phase in PEAK_PHASES and phase not in TIMED


class Highest:
    """The highest of what ``read`` gave since ``reset``; a read that fails (a device that is lost,
    a driver that is busy) is none, and ``failed`` counts it."""

    def __init__(self, read: Callable[[], int]) -> None:
        self.read, self.value, self.failed = read, 0, 0

    def reset(self) -> None:
        """Begin anew, with what there is now."""
        self.value = 0
        self.look()

    def look(self) -> int:
        """Read once; the highest so far."""
        try:
            self.value = max(self.value, self.read())
        except RuntimeError:
            self.failed += 1
        return self.value


class Sampler:
    """Looks at ``highest`` from a thread of its own, from ``start`` until ``stop``."""

    def __init__(self, highest: Highest, interval: float = INTERVAL) -> None:
        self.highest, self.interval = highest, interval
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether a thread is looking."""
        return self._thread is not None

    def start(self) -> None:
        """Begin to look; nothing where it does already."""
        if self._thread is None:
            self._over.clear()
            # A daemon, so that a worker that fails amid a phase can still end.
            self._thread = threading.Thread(target=self._look, name="memory sampler", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop looking; the thread has ended when it returns."""
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None

    def _look(self) -> None:
        while not self._over.wait(self.interval):
            self.highest.look()


# ---- usage ----
# What the kernel counted while a step ran: CPU seconds, switches and page faults of this process,
# and how busy the cores were with anybody's work.
#
# Read before the clock starts and after it has stopped. ``harness.report.figures.floor`` decides
# from them whether the machine was elsewhere.


class Counts(NamedTuple):
    """Of this process with all its threads (getrusage(2)), and of the cores that it may use."""

    cpu_seconds: float
    voluntary_switches: int
    forced_switches: int
    minor_faults: int
    busy_seconds: float

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(self, other, strict=True)))


def now() -> Counts:
    """The counts since the process began, and since the machine did."""
    used, busy = resource.getrusage(resource.RUSAGE_SELF), busy_now()
    cpu = used.ru_utime + used.ru_stime
    return Counts(cpu, used.ru_nvcsw, used.ru_nivcsw, used.ru_minflt, busy)


def as_usage(steps: list[Counts]) -> StepUsage:
    """The counts of some steps, a list for each."""
    columns = zip(*steps, strict=True) if steps else ([],) * len(Counts._fields)
    named = dict(zip(Counts._fields, map(list, columns), strict=True))
    return StepUsage(cores=len(os.sched_getaffinity(0)), **named)


# ---- gpu watch ----
# Asks how the GPUs are, beside untimed steps: clocks, throttling, other processes.
#
# nvidia-smi takes a good part of a second. It is started before a step that settles, so that it
# sees a device at work, and awaited before the next; started again behind the last timed step, and
# awaited at the end of the run. In a timed step nothing of it runs.


class GpuWatch:
    """Samples of the first ``count`` GPUs; of 0, and then does nothing, where this rank does not
    ask: one rank asks for all.

    Args:
        ask: (when, count) -> samples.
    """

    def __init__(
        self, count: int, ask: Callable[[str, int], list[GpuSample]] = gpu_state.sample
    ) -> None:
        self.count, self._ask = count, ask
        self._asking: threading.Thread | None = None
        self._known: list[GpuSample] = []

    def begin(self, when: str) -> None:
        """Ask in the background; ``end`` before the next step that is timed."""
        self.end()
        if self.count:
            self._asking = threading.Thread(target=self._sample, args=(when,), daemon=True)
            self._asking.start()

    def end(self) -> None:
        """Wait for the answer, if one was asked for."""
        if self._asking is not None:
            self._asking.join()
            self._asking = None

    def samples(self) -> list[GpuSample]:
        """All answers, the one under way included."""
        self.end()
        return self._known

    def _sample(self, when: str) -> None:
        self._known += self._ask(when, self.count)


# ---- heap ----
# glibc's heap of this process: giving freed memory back at once, for a meter, or keeping it, for a
# clock.
#
# A run on CPUs starts with ``launch.command.ALLOCATOR`` in its environment: resident memory
# follows live tensors, and each step faults all its pages in again, which costs a third of some
# steps and more of others. Nobody trains so. Once memory has been read, ``keep_freed`` puts in
# force what glibc's own rule comes to: it raises its threshold to the largest block that was
# mapped and freed, up to 32 MiB, and gives the top of the heap back above twice that (malloc(3),
# mallopt(3)).


MIB = 2**20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""mallopt's names, of <malloc.h>."""
KEPT = {M_MMAP_THRESHOLD: 32 * MIB, M_TRIM_THRESHOLD: 64 * MIB}
"""Where glibc's dynamic thresholds end on 64 bits: DEFAULT_MMAP_THRESHOLD_MAX, and twice that. A
block that comes again in each step is below its own rule's threshold, so that it is taken from the
heap under both; larger ones are mapped under both."""


def gives_back() -> bool:
    """Whether this process was started so that freed blocks go back to the kernel at once."""
    return all(os.environ.get(name) == value for name, value in ALLOCATOR.items())


def keep_freed() -> bool:
    """From now on the heap keeps freed blocks, as glibc's does by default.

    Whether that changed anything: a process that was not started with ``ALLOCATOR`` has glibc's
    own rule in force already, and one without glibc has no such settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not gives_back():
        return False
    return all([mallopt(name, value) for name, value in KEPT.items()])
