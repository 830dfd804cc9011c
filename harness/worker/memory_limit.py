"""Limit this process's memory, to test what fits on a smaller device."""

from __future__ import annotations

import resource
from pathlib import Path

import torch


def hold(device: torch.device, limit_bytes: int) -> None:
    """Let this process allocate at most ``limit_bytes`` more; beyond that it runs out of memory.

    On a GPU torch's allocator enforces the limit. Without one the kernel does: RLIMIT_DATA counts
    private mappings, so an allocation fails as on a machine without free memory.
    """
    if device.type == "cuda":
        # accelerate's device of a single process is "cuda", without an index.
        device = torch.device("cuda", torch.cuda.current_device())
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        return
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + limit_bytes, hard))


def _data_bytes() -> int:
    """Return the bytes that RLIMIT_DATA counts now: private writable memory, touched or not."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("this kernel does not tell the size of a process's data (VmData)")
