"""DeepSpeed's CPU Adam, and a cache of py-cpuinfo's result. Importing this module starts processes.

DeepSpeed (0.19) calls py-cpuinfo for each CPU Adam that it makes and twice for each op that it
loads: a second of processor time, three times for each rank. After this import, calls in this
process and its forks return the first result.
"""

from __future__ import annotations

import contextlib
import functools

with contextlib.suppress(ImportError):  # DeepSpeed then runs lscpu
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    with contextlib.suppress(Exception):  # DeepSpeed then runs lscpu too, and logs it
        cpuinfo.get_cpu_info()

from deepspeed.ops.adam import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
