"""Tensors that a communication thread still holds for a moment after its work was waited for.

gloo's threads drop a collective's tensors when they get to it, after ``wait()`` has returned
(ProcessGroupGloo::runLoop). A peak that falls into this moment counts them, on a busy machine more
often: repeated traces of one FSDP2 step were up to 4 % apart. So a trace of real ranks on a CPU
lets those threads have their turn before it counts a new maximum. On a GPU memory is given back in
the order of a stream, and nothing is to be waited for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

__all__ = ["awaited", "pause"]

PAUSE = 0.01
"""Seconds for the threads of two busy cores to get their turn; once for each work waited for."""


@contextlib.contextmanager
def awaited(noticed: Callable[[], None]) -> Iterator[None]:
    """While it lasts, ``noticed`` is called when a work of gloo has been waited for."""
    if not (dist.is_available() and dist.is_initialized() and "gloo" in dist.get_backend()):
        yield
        return
    wait = dist.Work.wait

    def waited(work: Any, *given: Any, **more: Any) -> Any:
        done = wait(work, *given, **more)
        noticed()
        return done

    with mock.patch.object(dist.Work, "wait", waited):
        yield


def pause() -> None:
    """Let other threads run: this one sleeps, and holds no lock of the interpreter."""
    time.sleep(PAUSE)
