"""Environment of a run: facts of machine and software."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from harness import ROOT
from harness.launch.sources import MEASURED, digest
from harness.system import gpus, machine
from harness.system.probe import version

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "numpy")


def describe(device: torch.device) -> dict[str, Any]:
    """Return CPU, memory, device, driver, versions and commit; None for an unknown fact."""
    facts: dict[str, Any] = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": machine.cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "code": digest(MEASURED),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "changed_files": len((_git("status", "--porcelain") or "").splitlines()),
        "versions": {name: version(name) for name in PACKAGES},
        "device": "cpu",  # or the GPU's name, below
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "device_bytes": properties.total_memory,
            "capability": list(torch.cuda.get_device_capability(device)),
            "cuda": torch.version.cuda,
            "driver": next(iter(gpus.smi("--query-gpu=driver_version").splitlines()), None),
            "allocator": allocator(),
            "attention": attention(device),
        }
    return facts


def allocator() -> str:
    """Return the caching allocator's settings. torch reads the first variable that is set (torch
    2.13, c10/cuda/CUDAAllocatorConfig.h)."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return next((os.environ[name] for name in names if name in os.environ), "default")


def attention(device: torch.device) -> dict[str, str]:
    """Return the attention backend that torch selects for each type on this device."""
    backends = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q_BNTK = torch.ones(1, 1, 128, 64, dtype=dtype, device=device, requires_grad=True)
        chosen = SDPBackend(torch._fused_sdp_choice(q_BNTK, q_BNTK, q_BNTK))
        backends[str(dtype).removeprefix("torch.")] = chosen.name
    return backends


def _git(*words: str) -> str | None:
    command = ["git", "-C", str(ROOT), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
