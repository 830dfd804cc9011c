"""Seconds of a step from its work: each op takes its FLOPs or its bytes, whichever is slower.

No torch: the work was counted by the trace (``work.Counter``) and does not depend on the GPU.
Nothing here was calibrated on a GPU; the efficiencies are those of public measurements of large
matrix products and of flash attention, and the uncertainty says what that is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.predict.cards import Card

__all__ = ["Seconds", "Work", "seconds"]

PRODUCTS, ATTENTION, STREAMING = 0.75, 0.40, 0.80
"""Share of the peak FLOP/s, and of the memory bandwidth, that kernels reach."""
LAUNCH = 5e-6
"""Seconds of an op that does almost nothing, in eager mode."""
COLLECTIVE = 3e-5
HOST_BANDWIDTH = 25e9
"""Bytes a second of host memory for one rank, where eight share a node's."""
NVME_BANDWIDTH = 3e9
OVERLAP = 0.8
"""Share of backward behind which DDP can hide its all-reduce."""
SPREAD = {"compute": 0.30, "communication": 0.50, "offload": 0.60}
"""Relative uncertainty of each part, uncalibrated."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """``count`` equal ops of one optimizer step. kind: product, attention, memory, collective
    (``bytes`` on the wire for many ranks), overlapped (the same, hidden behind backward),
    transfer (device to host or back), host, nvme."""

    phase: str
    kind: str
    dtype: str
    flops: int
    bytes: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of one optimizer step. ``spread``: plus or minus, in seconds."""

    compute: float
    communication: float
    offload: float

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.offload

    @property
    def spread(self) -> float:
        return sum(share * getattr(self, part) for part, share in SPREAD.items())


def seconds(work: Sequence[Work], gpu: Card, processes: int, tf32: bool = False) -> Seconds:
    """Predicted seconds of one step on ``gpu``, one of ``processes``."""
    compute = sum(_compute(w, gpu, tf32) for w in work)
    backward = sum(_compute(w, gpu, tf32) for w in work if w.phase == "backward")
    shown = sum(_collective(w, gpu, processes) for w in work if w.kind == "collective")
    hidden = sum(_collective(w, gpu, processes) for w in work if w.kind == "overlapped")
    return Seconds(
        compute=compute,
        communication=shown + max(0.0, hidden - OVERLAP * backward),
        offload=sum(_offload(w, gpu) for w in work),
    )


def _compute(w: Work, gpu: Card, tf32: bool) -> float:
    if w.kind not in ("product", "attention", "memory"):
        return 0.0
    share = ATTENTION if w.kind == "attention" else PRODUCTS
    by_flops = w.flops / (share * gpu.flops(w.dtype, tf32))
    by_bytes = w.bytes / (STREAMING * gpu.bandwidth)
    return w.count * max(by_flops, by_bytes, LAUNCH)


def _collective(w: Work, gpu: Card, processes: int) -> float:
    """Ring: every rank sends (n - 1) / n of the bytes."""
    bandwidth = gpu.link_bandwidth if processes <= gpu.node else gpu.network_bandwidth
    return w.count * (COLLECTIVE + w.bytes * (processes - 1) / processes / bandwidth)


def _offload(w: Work, gpu: Card) -> float:
    rate = {
        "transfer": gpu.host_bandwidth,
        "host": HOST_BANDWIDTH,
        "nvme": NVME_BANDWIDTH,
    }.get(w.kind)
    return w.count * w.bytes / rate if rate else 0.0
