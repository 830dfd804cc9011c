"""Asks how the GPUs are, beside untimed steps: clocks, throttling, other processes.

nvidia-smi takes a good part of a second. It is started before a step that settles, so that it sees
a device at work, and awaited before the next; started again behind the last timed step, and awaited
at the end of the run. In a timed step nothing of it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from harness.result import GpuSample
from harness.system import gpu_state

__all__ = ["GpuWatch"]


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
