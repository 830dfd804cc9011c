"""Cache of py-cpuinfo's answer. Importing this module starts processes: import it for ZeRO alone.

DeepSpeed (0.19) calls py-cpuinfo for each CPU Adam that it makes and twice for each op that it
loads. Each call starts a Python process, which runs machine code in further processes: a second of
processor time, three times for each rank. After this import, calls in this process and its forks
return the first answer.
"""

from __future__ import annotations

import contextlib
import functools

with contextlib.suppress(ImportError):  # DeepSpeed asks lscpu then
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    with contextlib.suppress(Exception):  # the same, and DeepSpeed says so
        cpuinfo.get_cpu_info()
