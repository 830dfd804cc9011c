"""glibc's heap of this process: giving freed memory back at once, for a meter, or keeping it, for a
clock.

A run on CPUs starts with ``launch.command.ALLOCATOR`` in its environment: resident memory follows
live tensors, and each step faults all its pages in again, which costs a third of some steps and
more of others. Nobody trains so. Once memory has been read, ``keep_freed`` puts in force what
glibc's own rule comes to: it raises its threshold to the largest block that was mapped and freed,
up to 32 MiB, and gives the top of the heap back above twice that (malloc(3), mallopt(3)).
"""

from __future__ import annotations

import ctypes
import os

from harness.launch.command import ALLOCATOR

__all__ = ["KEPT", "gives_back", "keep_freed"]

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
