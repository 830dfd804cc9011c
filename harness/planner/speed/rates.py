"""What kernels, memory and links of a card reach: measured, or typical shares of its data sheet.

The typical shares are those of public measurements of large matrix products and flash attention.
No torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.planner import overhead
from harness.planner.calibration import store
from harness.planner.calibration import store as here
from harness.planner.calibration.record import (
    AttentionRate,
    Calibration,
    Ceilings,
    Device,
    Stream,
    load,
)
from harness.planner.calibration.store import Applied
from harness.planner.speed import cards
from harness.planner.speed.cards import Card
from harness.result import Wire, load_all
from harness.system import gpus
from strategies.base import BadInput

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
    kind = overhead.preferred(gpu.capability)
    return overhead.choose(kind, dtype, width, False, overhead.ORDERS[kind])


# ---- network ----
# The network between nodes as a plan takes it: typical of a card's clusters, or measured.
#
# The seam for a calibration: whoever has measured a network gives its ``Wire``.


def of_results(gpu: Card, folder: Path) -> Card:
    """``gpu`` between nodes as the results in ``folder`` measured them; the slowest of several.

    Raises:
        BadInput: no result there was measured on several nodes with GPUs.
    """
    wires = [r.wire for r in load_all(folder)[0] if r.wire and r.wire.backend == "nccl"]
    if not wires:
        raise BadInput(
            f"network is {folder}: no result there has a network measured between GPUs; run "
            "./run.sh run --nodes on such machines, or leave --network out"
        )
    return measured(gpu, min(wires, key=lambda wire: wire.bandwidth), str(folder))


def measured(gpu: Card, wire: Wire, told: str) -> Card:
    """``gpu`` with a network that was measured. One process a node measured it: a node with
    several network cards may reach more with all its GPUs, so that the time is an upper bound."""
    return dataclasses.replace(gpu, network_bandwidth=wire.bandwidth, network_told=told)


# ---- calibrated ----
# A card with the calibration that is for it, or with the one that was asked for. No torch.


FILE = "calibration.json"
"""Beside a set of results: the calibration of the machine that they are of."""

NONE = "none"
"""In place of a calibration's file: typical figures, whatever is kept."""
UNTRIED = "No step time measured on {} was ever compared with a prediction: its times are untried."
UNCALIBRATED = (
    "Times, context and communication are typical figures; ./run.sh calibrate on such a machine "
    "makes them its own."
)


def find(name: str) -> Card:
    """The card of that name: the table's, or one that was calibrated.

    Raises:
        BadInput: neither knows it; names the nearest.
    """
    try:
        return cards.find(name)
    except BadInput:
        for one in store.every():
            if one.device.kind == "cuda" and one.device.name.lower() == name.strip().lower():
                return cards.of_device(one.device)
        raise


def this_cpu() -> Card:
    """The CPU that this runs on."""
    cpu = here.device("cpu")
    return cards.of_cpu(cpu.name, cpu.cores, cpu.memory_bytes)


def as_calibrated(card: Card, asked: str = "") -> Card:
    """``card`` with its calibration: the one in the file ``asked``, none for ``NONE``, or else the
    best that is kept for it, if there is one.

    Raises:
        BadInput: the file is no calibration, or one of another kind of device.
    """
    if asked == NONE:
        return card
    if asked:
        found = load(Path(asked))
        if (found.device.kind == "cpu") != card.shared:
            raise BadInput(
                f"calibration {asked} is of {found.device.name}; give one of the device that the "
                f"plan is for, or --calibration {NONE}"
            )
        return cards.with_calibration(card, _applied([found]))
    return cards.with_calibration(card, _applied([o for o in store.every() if _is(card, o)]))


def kept_for(device: str) -> Applied | None:
    """The best calibration that is kept for a device, named as a worker names it: a GPU, or cpu."""
    if device == "cpu":
        return as_calibrated(this_cpu()).calibrated
    same = [one for one in store.every() if one.device.name == device]
    return _applied(same)


def keep_beside(folder: Path, device: str) -> None:
    """Leave the calibration of ``device`` beside results that were measured on it, so that their
    report is made of the same wherever it is made. Nothing where there is none."""
    found = kept_for(device)
    if found:
        with contextlib.suppress(OSError):
            found.calibration.write(folder / FILE)


def _is(card: Card, calibration: Calibration) -> bool:
    device = calibration.device
    if card.shared or device.kind == "cpu":
        return card.shared and device.kind == "cpu" and card.name == device.name
    return not card.like and cards.of_device(device).name == card.name


def _applied(calibrations: list[Calibration]) -> Applied | None:
    """The best of them, marked by what is installed here; a driver counts where the card is."""
    present = {gpu.name for gpu in gpus.visible()} if calibrations else set()
    known = any(one.device.name in present for one in calibrations)
    return store.choose(calibrations, driver=here.driver() if known else "", torch=here.torch())


def of_environment(environment: Mapping[str, Any], found: Calibration | None) -> Card | None:
    """The card that a result was measured on, by what its worker recorded, with the calibration
    that lies beside it; None for one that nothing is known of."""
    device = str(environment.get("device") or "")
    if found is None or not measured_on(environment, found.device):
        return cards.named(device, int(environment.get("device_bytes") or 0))
    versions = environment.get("versions") or {}
    known = store.applied(
        found,
        driver=environment.get("driver") or "",
        torch=versions.get("torch") or "",
        cores=environment.get("cores") or 0,
    )
    return cards.with_calibration(cards.of_device(found.device), known)


def measured_on(environment: Mapping[str, Any], device: Device) -> bool:
    """Whether ``device`` is the one of that environment."""
    if device.kind == "cpu":
        same = str(environment.get("cpu") or "") == device.name.rpartition(", ")[0]
        return environment.get("device") == "cpu" and same
    return environment.get("device") == device.name


def words(card: Card) -> str:
    """What its predictions rest on beside the trace, in sentences."""
    if card.calibrated:
        return card.calibrated.words
    if card.like or not card.untried:
        return UNCALIBRATED
    return f"{UNCALIBRATED} {UNTRIED.format(card.name)}"
