"""Bytes that stand beside a training: CUDA's context and cuBLAS's workspaces, or an interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import torch

from harness import ROOT
from harness.calibrate.stations.asked import Asked
from harness.system import gpus

__all__ = ["measure"]

MIB = 2**20
WORKER = "import harness.train; print(open('/proc/self/status').read())"
USED = "--query-gpu=index,uuid,memory.used"


def measure(asked: Asked) -> dict[str, Any]:
    """``context`` and ``libraries``, bytes."""
    if not asked.on_gpu:
        return {"context": _interpreter()}
    before = _used()
    one = torch.ones(1, device=asked.device)
    free, total = torch.cuda.mem_get_info(asked.device)
    context = total - free - torch.cuda.memory_reserved(asked.device) - before
    del one
    return {"context": max(0, context), "libraries": _libraries(asked)}


def _used() -> int:
    """What others hold of the first GPU that is seen, before this process has a context."""
    rows = gpus.rows(gpus.smi(USED), 3)
    found = gpus.parse("\n".join(f"{i}, {uuid}, -, 0, {used}" for i, uuid, used in rows), "")
    return next((gpu.used_bytes for gpu in gpus.chosen(found)), 0)


def _libraries(asked: Asked) -> int:
    """What stays allocated once products ran in this thread and in autograd's."""
    x = asked.random(1024, 1024, dtype=torch.bfloat16, requires_grad=True)
    before = torch.cuda.memory_allocated(asked.device)
    (x @ x).sum().backward()
    x.grad = None
    asked.synchronize()
    return torch.cuda.memory_allocated(asked.device) - before


def _interpreter() -> int:
    """What a worker holds before it has a model."""
    done = subprocess.run(
        [sys.executable, "-c", WORKER], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", done.stdout)[1])
