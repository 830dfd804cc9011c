"""What py-cpuinfo says of this machine's processor, asked once a process: on import.

DeepSpeed (0.19) asks for each CPU Adam that it makes and twice for each op that it loads, and each
time py-cpuinfo starts a Python of its own, which runs machine code in further processes: a second
of CPU, three times for each rank. From this import on they have the first answer, and so have
forks of the process.
"""

from __future__ import annotations

import contextlib
import functools

__all__: list[str] = []

with contextlib.suppress(ImportError):  # DeepSpeed asks lscpu then
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    with contextlib.suppress(Exception):  # the same, and DeepSpeed says so
        cpuinfo.get_cpu_info()
