"""What kernels, memory and links of a card reach: measured, or typical shares of its data sheet.

The typical shares are those of public measurements of large matrix products and flash attention.
No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.calibration.record import AttentionRate, Ceilings, Stream
from harness.predict import attention
from harness.predict.speed.cards import Card

__all__ = ["ISSUE", "LAUNCH", "SLOWEST", "Rates", "rates"]

PRODUCTS, ATTENTION, STREAMING = 0.75, 0.40, 0.80
"""Share of the peak FLOP/s, and of the memory bandwidth, that kernels reach."""
LAUNCH = 5e-6
"""Seconds of an op that does almost nothing, in eager mode."""
ISSUE, SLOWEST = 35e-6, 85e-6
"""Seconds in which the host of a public trainer issues one operation (Python of libraries, hooks,
autograd), usually and at the slowest: steps that are nothing but that took 28 to 47 microseconds an
operation where others measured them, two of seven models' with checkpoints 74 to 265
(docs/models.md)."""
COLLECTIVE = 3e-5
HOST_BANDWIDTH = 25e9
"""Bytes a second of host memory for one rank, where eight share a node's."""
NVME_BANDWIDTH = 3e9
OVERLAP = 0.8
"""Share of backward behind which DDP can hide its all-reduce on a GPU; on a CPU the same cores do
both."""
HALF = ("float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """For one of several processes. FLOP/s by type of product and of attention where they were
    measured, of ``gpu`` where not; bytes a second (``wire`` between processes of one machine,
    ``far_wire`` between machines); seconds of a launch and of a small collective.
    ``share``: of a CPU that several processes share."""

    gpu: Card
    share: float = 1.0
    products: Mapping[str, float] = field(default_factory=dict)
    kernels: Mapping[str, float] = field(default_factory=dict)
    streams: Sequence[Stream] = ()
    launch: float = LAUNCH
    collective_seconds: float = COLLECTIVE
    wire: float = 0.0
    far_wire: float = 0.0
    to_host: float = 0.0
    host: float = HOST_BANDWIDTH
    nvme: float = NVME_BANDWIDTH

    def product(self, dtype: str, tf32: bool = False) -> float:
        """FLOP/s of matrix products in ``dtype``; float32's where there is no such unit."""
        kind = "tf32" if tf32 and dtype == "float32" else dtype
        typical = PRODUCTS * self.gpu.flops(dtype, tf32)
        return self.share * self.products.get(kind, typical)

    def attention(self, dtype: str, tf32: bool = False) -> float:
        """The same of fused attention."""
        return self.share * self.kernels.get(dtype, ATTENTION * self.gpu.flops(dtype, tf32))

    def streaming(self, size: int) -> float:
        """Bytes a second of an operation that moves ``size`` bytes: those of the nearest measured
        size that is no larger, for what is small may stay in a cache."""
        if not self.streams:
            return self.share * STREAMING * self.gpu.bandwidth
        ordered = sorted(self.streams, key=lambda stream: stream.bytes)
        smaller = [stream for stream in ordered if stream.bytes <= size]
        return self.share * (smaller[-1] if smaller else ordered[0]).rate

    def slowed(self, compute: float, communication: float) -> Rates:
        """The same where operations, and where links, take so many times as long."""
        return replace(
            self,
            share=self.share / compute,
            launch=self.launch * compute,
            collective_seconds=self.collective_seconds * communication,
            wire=self.wire / communication,
            far_wire=self.far_wire / communication,
        )

    @property
    def overlap(self) -> float:
        """Share of backward behind which an all-reduce can hide."""
        return 0.0 if self.gpu.shared else OVERLAP


def rates(gpu: Card, processes: int) -> Rates:
    """What one of ``processes`` on ``gpu`` reaches."""
    far = processes > gpu.node and not gpu.shared
    typical: dict[str, Any] = {
        "share": 1 / processes if gpu.shared else 1.0,
        "wire": gpu.link_bandwidth,
        "far_wire": gpu.link_bandwidth if gpu.shared else gpu.network_bandwidth,
        "to_host": gpu.host_bandwidth,
        "host": gpu.bandwidth / processes if gpu.shared else HOST_BANDWIDTH,
    }
    if gpu.calibrated is None:
        return Rates(gpu=gpu, **typical)
    ceilings = gpu.calibrated.calibration.ceilings
    return Rates(gpu=gpu, **{**typical, **_measured(ceilings, gpu, processes, far)})


def _measured(ceilings: Ceilings, gpu: Card, processes: int, far: bool) -> dict[str, Any]:
    """The fields of rates that were measured."""
    shared, collective = gpu.shared, ceilings.collective
    found: dict[str, Any] = {
        "products": {**ceilings.products, **ceilings.model_products},
        "kernels": _kernels(ceilings.attention, gpu),
        "streams": tuple(ceilings.streams),
    }
    if ceilings.launch_seconds:
        found["launch"] = ceilings.launch_seconds
    if ceilings.host_rate and shared:
        found["host"] = ceilings.host_rate / processes
    elif ceilings.host_rate:
        # Ranks of a node share its memory, and each GPU's own share is what is typical of eight.
        found["host"] = max(HOST_BANDWIDTH, ceilings.host_rate / min(processes, gpu.node))
    ways = [rate for way, rate in ceilings.copies.items() if way.startswith("pinned")]
    if ways:
        found["to_host"] = sum(ways) / len(ways)
    if collective:
        found["wire"] = collective.rate
        found |= {} if far else {"collective_seconds": collective.seconds}
        found |= {"far_wire": collective.rate} if shared else {}
    return found


def _kernels(measured: Sequence[AttentionRate], gpu: Card) -> dict[str, float]:
    """Type -> FLOP/s of the kernel that torch takes for it, at the slower of the widths."""
    found: dict[str, float] = {}
    for one in measured:
        if one.kernel == _taken(one.dtype, one.width, gpu):
            found[one.dtype] = min(one.rate, found.get(one.dtype, one.rate))
    return found


def _taken(dtype: str, width: int, gpu: Card) -> str:
    if gpu.shared:
        return "flash"
    kind = attention.preferred(gpu.capability)
    return attention.choose(kind, dtype, width, False, attention.ORDERS[kind])
