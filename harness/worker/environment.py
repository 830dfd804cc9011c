"""Facts of the machine and the software a run was measured on, from inside the worker."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from harness import ROOT
from harness.launch.sources import MEASURED, digest
from harness.result import reported_name
from harness.system import machine
from harness.system.probe import version

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "numpy")


def describe(device: torch.device) -> dict[str, Any]:
    """CPU, memory, device, driver, versions and commit; a fact that cannot be had is None."""
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
            "device": reported_name(properties.name),
            "device_bytes": properties.total_memory,
            "capability": list(torch.cuda.get_device_capability(device)),
            "cuda": torch.version.cuda,
            "driver": _driver(),
            "allocator": allocator(),
            "attention": attention(device),
        }
    return facts


def allocator() -> str:
    """The caching allocator's settings; torch takes the first variable that is set
    (torch 2.13, c10/cuda/CUDAAllocatorConfig.h)."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return next((os.environ[name] for name in names if name in os.environ), "default")


def attention(device: torch.device) -> dict[str, str]:
    """Type -> the backend that torch takes for attention on this device where none is forced."""
    backends = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q_BNTK = torch.ones(1, 1, 128, 64, dtype=dtype, device=device, requires_grad=True)
        chosen = SDPBackend(torch._fused_sdp_choice(q_BNTK, q_BNTK, q_BNTK))
        backends[str(dtype).removeprefix("torch.")] = chosen.name
    return backends


def _git(*words: str) -> str | None:
    return _output(["git", "-C", str(ROOT), *words])


def _driver() -> str | None:
    text = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return text.splitlines()[0] if text else None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# ---- world ----
# A world of N on one process: it stands for rank 0 of an N-rank job.
#
# torch's fake process group reports N ranks and moves nothing: an all-reduce leaves a tensor as it
# is, a gather returns N copies of one's own, a reduce-scatter one's own part. The engines are real
# and allocate what rank 0 of N would, so the memory is real; time is that of computation without
# communication, and losses mean nothing. What NCCL itself holds on a GPU is not there.


def simulate(ranks: int, rank: int = 0) -> None:
    """Make this process ``rank`` of ``ranks``; to be called before Accelerator makes a group."""
    # A private module of torch's, and the only home of this store; torchtitan uses it too.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
