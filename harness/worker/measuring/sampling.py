"""The most that a device's own count of used bytes shows while something runs.

The caching allocator keeps maxima of its own counts; what the driver counts (context, communication
buffers, workspaces that libraries take and give back) has none, and must be looked at meanwhile. A
thread does that, in phases whose steps are not timed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from harness.phases import PEAK_PHASES

__all__ = ["INTERVAL", "Highest", "Sampler", "is_sampled"]

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
