"""Offload to NVMe, predicted from offload to host memory: swapping does real I/O on real bytes.

The engine is told to keep the optimizer in host memory, and what it keeps there is then counted
as on the drive; the buffers through which DeepSpeed swaps are added to host memory.
Source: deepspeed 0.19, runtime/swap_tensor/partitioned_optimizer_swapper.py (``buffer_count``
pinned buffers, each as large as the largest sub-group in float32, aligned).
"""

from __future__ import annotations

from typing import Any

from harness.resolve import Resolved

__all__ = ["POOL", "Swapped", "is_used", "stay_in_memory"]

POOL = "nvme"
BUFFERS = 4
"""DeepSpeed's default ``buffer_count``."""


def is_used(resolved: Resolved) -> bool:
    """Whether this recipe swaps its optimizer."""
    return resolved.launch.offload_optimizer == "nvme"


def stay_in_memory(accelerator: Any) -> None:
    """Turn every "nvme" of the engine's config into "cpu"."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is None:
        return
    for what in ("offload_optimizer", "offload_param"):
        block = plugin.deepspeed_config["zero_optimization"].get(what, {})
        if block.get("device") == POOL:
            block["device"] = "cpu"
            block.pop("nvme_path", None)


class Swapped:
    """Holds the swap buffers for the length of the steps; ``finish`` moves the state to files."""

    def __init__(self, resolved: Resolved, tracer: Any, run: Any) -> None:
        self.tracer = tracer
        self.host = tracer.pools["cpu"]
        masters = run.trained.engine.optimizer.fp32_partitioned_groups_flat
        # Offload to memory keeps a float32 gradient beside each master; swapped, it has none.
        tracer.tag("optimizer_state", [m.grad for m in masters if m.grad is not None])
        count = resolved.file.zero.get("offload_optimizer", {}).get("buffer_count", BUFFERS)
        largest = max(master.numel() for master in masters)
        tracer.hold(self.host, count * largest * 4, "swap buffers", "temporaries")

    def finish(self, counter: Any) -> None:
        """Move the optimizer's state to the drive, and count a step's reading and writing."""
        size = 0
        for block in self.tracer.record.blocks:
            if block.pool == self.host and block.category == "optimizer_state":
                block.pool = POOL
                size += block.size if block.freed_in is None else 0
        counter.add("optimizer", POOL, "", 0, 2 * size)
