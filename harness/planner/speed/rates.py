"""Rates that a card's kernels, memory and links reach, and the choice of a card's calibration.
Rates are measured, or sustained shares of the data sheet by kind of card, from public measurements
of matrix products and attention (``harness/system/cards.json``). Does not import torch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import RUN
from harness.planner import overhead
from harness.planner.calibration import store
from harness.planner.calibration.record import (
    AttentionRate,
    Calibration,
    Device,
    Stream,
    load,
)
from harness.planner.calibration.store import Applied
from harness.system import cards, gpus
from harness.system.cards import Card
from strategies.base import BadInput

SLENDER, WIDE = 750, 1365
"""Multiplications for each number that is moved, M N K / (M N + N K + K M): in the shapes of
DiT-XL's blocks with 8,192 tokens (their mean; squares of 2,048 have nearly as many), and in squares
of 4,096. Between them a rate follows the logarithm."""
LAUNCH = 5e-6
"""Seconds of an op that does almost nothing, in eager mode."""
ISSUE = 35e-6
"""Seconds in which a host usually issues one operation (Python of libraries, hooks, autograd). One
that backward recomputes counts twice (``roofline.issues``). This project's own steps on an H200
took 29 to 39 microseconds, and 39 to 46 with checkpoints (docs/explanation/accuracy.md)."""
RECOMPUTING = 85e-6
"""The same of the slowest host: two of ten published models with checkpoints took 72 to 250
(docs/explanation/accuracy.md). Comparisons of recipes allow for it."""
COLLECTIVE = 3e-5
"""Seconds of a small collective among the GPUs that NVLink or PCIe joins."""
HOP, FAR_HOP = 1.9e-6, 4e-6
"""Seconds that each further rank of a ring adds, within a node and from node to node: NCCL's own
model of its LL128 protocol (NVIDIA/nccl, src/graph/tuning.cc, hwLat). Its other protocols take up
to 3.4 and 14 microseconds; AMD's RCCL states 1.5 to 2.2 for the former."""
HOST_BANDWIDTH = 25e9
"""Bytes per second of host memory for one rank, if eight share a node's."""
NVME_BANDWIDTH = 3e9
OVERLAP = 0.8
"""Share of backward that can hide DDP's all-reduce on a GPU. On a CPU the same cores do both."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one of several processes.
    ``products`` and ``squares``: measured FLOP/s of matrix products by dtype, in the shapes of a
    DiT and in large squares. ``kernels``: dtype -> [tokens, FLOP/s] of attention, shortest first.
    Typical ones of ``gpu`` fill the gaps. ``wire`` and ``far_wire``: bytes per second between
    processes of one machine and between machines. ``launch`` and ``collective_seconds``: seconds of
    a launch and of a small collective. ``share``: the process's share of a CPU."""

    gpu: Card
    share: float = 1.0
    products: Mapping[str, float] = field(default_factory=dict)
    squares: Mapping[str, float] = field(default_factory=dict)
    kernels: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    streams: Sequence[Stream] = ()
    launch: float = LAUNCH
    collective_seconds: float = COLLECTIVE
    wire: float = 0.0
    far_wire: float = 0.0
    to_host: float = 0.0
    host: float = HOST_BANDWIDTH
    nvme: float = NVME_BANDWIDTH

    def product(self, dtype: str, tf32: bool = False, depth: float = 0.0) -> float:
        """Return the FLOP/s of matrix products in ``dtype``; float32's if the card lacks that unit.
        ``depth``: multiplications for each number that is moved. Between ``SLENDER`` and ``WIDE``
        the rate follows its logarithm."""
        kind = "tf32" if tf32 and dtype == "float32" else dtype
        peak, near = self.gpu.flops(dtype, tf32), cards.WITHOUT.get(kind, "")
        if kind in self.products:
            low = self.products[kind]
            high = max(low, self.squares.get(kind, low))
        elif near in self.products:  # float8 takes the share of bfloat16
            low = high = self.products[near] / self.gpu.flops(near) * peak
        else:
            low, high = (share * peak for share in self.gpu.product_shares(kind))
        return self.share * between(((SLENDER, low), (WIDE, high)), depth)

    def attention(self, dtype: str, tokens: float = math.inf) -> float:
        """Return the FLOP/s of fused attention in ``dtype`` over ``tokens``.
        Between measured lengths the rate follows their logarithm. In float32 it has no TF32 rate:
        the kernel makes each product of three in TF32, whatever torch's setting. Source: torch
        2.13, mem_eff_attention/gemm_kernel_utils.h (OpMultiplyAddFastF32). An H100 and an H200
        reached 19 to 39 TFLOP/s, 0.3 to 0.6 of the data sheet's float32."""
        known = self.kernels.get(dtype)
        if not known:
            peak = self.gpu.flops(dtype)
            known = [(one, share * peak) for one, share in self.gpu.attention_shares(dtype)]
        return self.share * between(known, tokens)

    def streaming(self, size: int) -> float:
        """Return the bytes per second of an operation that moves ``size`` bytes.
        It is the rate of the largest measured size up to ``size``, because smaller sizes may stay
        in a cache."""
        if not self.streams:
            return self.share * self.gpu.streaming * self.gpu.bandwidth
        ordered = sorted(self.streams, key=lambda stream: stream.bytes)
        smaller = [stream for stream in ordered if stream.bytes <= size]
        return self.share * (smaller[-1] if smaller else ordered[0]).rate

    @property
    def overlap(self) -> float:
        """Share of backward that can hide an all-reduce."""
        return 0.0 if self.gpu.shared else OVERLAP


def between(known: Sequence[tuple[float, float]], where: float) -> float:
    """Return the value at ``where`` of (place, value) pairs in order.
    It follows the logarithm of the place between two of them, and is level beyond the ends."""
    before = [one for one in known if one[0] <= where] or [known[0]]
    after = [one for one in known if one[0] > where] or [known[-1]]
    (low, first), (high, last) = before[-1], after[0]
    way = math.log(where / low) / math.log(high / low) if low < where < high else 0.0
    return first + way * (last - first)


def rates(gpu: Card, processes: int) -> Rates:
    """Return the rates of one of ``processes`` on ``gpu``: measured ones, and typical ones."""
    far = processes > gpu.linked and not gpu.shared
    typical: dict[str, Any] = {
        "share": 1 / processes if gpu.shared else 1.0,
        "wire": gpu.link_bandwidth,
        "far_wire": gpu.link_bandwidth if gpu.shared else gpu.network_bandwidth,
        "to_host": gpu.host_bandwidth,
        "host": gpu.bandwidth / processes if gpu.shared else HOST_BANDWIDTH,
    }
    if gpu.calibrated is None:
        return Rates(gpu=gpu, **typical)
    ceilings, shared = gpu.calibrated.calibration.ceilings, gpu.shared
    collective = ceilings.collective
    found: dict[str, Any] = {
        "products": {**ceilings.products, **ceilings.model_products},
        "squares": {} if shared else ceilings.products,
        "kernels": _kernels(ceilings.attention, gpu),
        "streams": tuple(ceilings.streams),
    }
    if ceilings.launch_seconds:
        found["launch"] = ceilings.launch_seconds
    if ceilings.host_rate and shared:
        found["host"] = ceilings.host_rate / processes
    elif ceilings.host_rate:
        # Ranks of a node share its memory; HOST_BANDWIDTH is a rank's share among eight.
        found["host"] = max(HOST_BANDWIDTH, ceilings.host_rate / min(processes, gpu.node))
    ways = [rate for way, rate in ceilings.copies.items() if way.startswith("pinned")]
    if ways:
        found["to_host"] = sum(ways) / len(ways)
    if collective:
        found["wire"] = collective.rate
        found |= {} if far else {"collective_seconds": collective.seconds}
        found |= {"far_wire": collective.rate} if shared else {}
    return Rates(gpu=gpu, **{**typical, **found})


def _kernels(measured: Sequence[AttentionRate], gpu: Card) -> dict[str, list[tuple[int, float]]]:
    """Return dtype -> [tokens, FLOP/s] of the kernel that torch takes for it, shortest first.
    At each number of tokens it is the slower of the head widths."""
    kind, found = overhead.preferred(gpu.capability), dict[tuple[str, int], float]()
    order = overhead.ORDERS[kind]
    for one in measured:
        taken = overhead.choose(kind, one.dtype, one.width, False, order)
        if one.kernel == ("flash" if gpu.shared else taken):
            key = one.dtype, one.tokens
            found[key] = min(one.rate, found.get(key, one.rate))
    lists: dict[str, list[tuple[int, float]]] = {}
    for (dtype, tokens), rate in sorted(found.items()):
        lists.setdefault(dtype, []).append((tokens, rate))
    return lists


def with_network(gpu: Card, gigabytes: float) -> Card:
    """Return ``gpu`` with a network of ``gigabytes`` (GB/s) that each node sends.

    Raises:
        BadInput: it is not positive.
    """
    if not 0 < gigabytes < math.inf:
        raise BadInput(f"network is {gigabytes:g}; give --network GB/s above 0, as 25")
    return replace(gpu, network_bandwidth=gigabytes * 1e9, network_told="as given")


FILE = "calibration.json"
"""Name of the calibration file beside results; it is of the machine that measured them."""

NONE = "none"
"""Value in place of a calibration's file: use typical figures."""
UNTRIED = "Times are untried: no measured step time on {} was compared with a prediction."
UNKNOWN = (
    "Times on {} are unknown: no public measurement says which share of its peaks kernels reach. "
    "Those shown order the recipes, by shares of other cards."
)
UNCALIBRATED = (
    f"Times, context and communication are typical figures. {RUN} calibrate on such a "
    "machine replaces them."
)


def find(name: str) -> Card:
    """Return the card of that name, from the table or from the calibrations.

    Raises:
        BadInput: an unknown or ambiguous name; the message has the nearest.
    """
    try:
        return cards.find(name)
    except BadInput:
        for one in store.every():
            if one.device.kind == "cuda" and one.device.name.lower() == name.strip().lower():
                return of_device(one.device)
        raise


def of_device(device: Device) -> Card:
    """Return the card of a calibration's device.
    It is the table's if that is known, else one with the device's name and the speed of its memory
    size."""
    if device.kind == "cpu":
        return cards.of_cpu(device.name, device.cores, device.memory_bytes)
    known = cards.named(device.name, device.memory_bytes)
    if known is not None:
        return known
    capability = (device.capability[0], device.capability[1]) if device.capability else None
    near = cards.of_size(device.memory_bytes)
    return replace(near, name=device.name, device=device.name, like="", capability=capability)


def this_cpu() -> Card:
    """Return this machine's CPU."""
    cpu = store.device("cpu")
    return cards.of_cpu(cpu.name, cpu.cores, cpu.memory_bytes)


def as_calibrated(card: Card, asked: str = "") -> Card:
    """Return ``card`` with its calibration.

    ``asked`` is a file, or ``NONE`` for none; empty takes the best stored one, if any.

    Raises:
        BadInput: the file is no calibration, or is of another kind of device.
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
        return replace(card, calibrated=_applied([found]))
    alike = [one for one in store.every() if (one.device.kind == "cpu") == card.shared]
    own = [one for one in alike if not card.like and of_device(one.device).name == card.name]
    return replace(card, calibrated=_applied(own))


def kept_for(device: str) -> Applied | None:
    """Return the best stored calibration for a device, by a worker's name for it (a GPU, or
    cpu)."""
    if device == "cpu":
        return as_calibrated(this_cpu()).calibrated
    return _applied([one for one in store.every() if one.device.name == device])


def keep_beside(folder: Path, device: str) -> None:
    """Write the calibration of ``device`` beside results measured on it, if there is one.
    Reports made on other machines then use the same calibration."""
    found = kept_for(device)
    if found:
        with contextlib.suppress(OSError):
            found.calibration.write(folder / FILE)


def _applied(calibrations: list[Calibration]) -> Applied | None:
    """Return the best of them, marked by the versions installed here.
    The driver is compared only if the calibrated card is in this machine."""
    present = {gpu.name for gpu in gpus.visible()} if calibrations else set()
    known = any(one.device.name in present for one in calibrations)
    return store.choose(calibrations, driver=store.driver() if known else "", torch=store.torch())


def of_environment(environment: Mapping[str, Any], found: Calibration | None) -> Card | None:
    """Return the card that a result was measured on, or None if it is unknown.
    It comes from the worker's record. ``found`` is the calibration beside the result and is used if
    it is of that device."""
    device, same = str(environment.get("device") or ""), False
    if found and found.device.kind == "cpu":
        name = str(environment.get("cpu") or "")
        same = device == "cpu" and name == found.device.name.rpartition(", ")[0]
    elif found:
        same = environment.get("device") == found.device.name
    if found is None or not same:
        return cards.named(device, int(environment.get("device_bytes") or 0))
    versions = environment.get("versions") or {}
    known = store.applied(
        found,
        driver=environment.get("driver") or "",
        torch=versions.get("torch") or "",
        cores=environment.get("cores") or 0,
    )
    return replace(of_device(found.device), calibrated=known)


def words(card: Card) -> str:
    """Return sentences about the source of the card's predicted times."""
    if card.calibrated:
        return card.calibrated.words
    if card.like or not card.untried:
        return UNCALIBRATED
    label = UNKNOWN if card.unmeasured else UNTRIED
    return f"{UNCALIBRATED} {label.format(card.name)}"
