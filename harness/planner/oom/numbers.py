"""Numbers of an out-of-memory message, and the parts of a card's memory that follow from them.
The messages are those of torch 1.13 to 2.13 (c10/cuda/CUDACachingAllocator.cpp, ``malloc``), of its
cudaMallocAsync backend, of MPS, NCCL, numpy and the kernel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

SIZE = r"(\d[\d.,]{0,20}) ?([kKMGTPE]?i?B|bytes)\b"
PATTERNS = {
    "requested": (r"[Tt]ried to allocate {}", r"Requested *: {}", r"Unable to allocate {}",
                  r"Failed to CUDA \w*alloc(?: async)? {}", r"unable to mmap {}"),
    # torch 2.1 spells it "capacty".
    "capacity": (r"total capaci?ty of {}", r"{} total capacity", r"Device limit *: {}",
                 r"max allowed: {}"),
    "free": (r"of which {} is free", r"{} free;", r"Free \(according to CUDA\) *: {}"),
    "process": (r"this process has {} memory in use", r"anon-rss:{}"),
    "allocated": (r"{} is allocated by PyTorch", r"{} already allocated",
                  r"Currently allocated *: {}", r"MPS allocated: {}"),
    "cached": (r"{} is reserved by PyTorch but unallocated", r"{} cached\)"),
    "reserved": (r"{} reserved in total by PyTorch",),
    "elsewhere": (r"other allocations: {}",),
    "limit": (r"{} allowed;",),
}  # fmt: skip
"""Field of ``Numbers`` -> the forms of its number. ``reserved`` and ``elsewhere`` give others: a
Mac states no free memory."""
OTHER = re.compile(rf"Process (\d{{1,12}}) has {SIZE} memory in use")
GPU = re.compile(r"(?:GPU|[NX]PU|device) (\d+)\b", re.I)
WRAPPED = 2**64
"""Bytes to which a negative size wraps around in an unsigned number."""
SLACK = 2**27
"""Bytes by which the sizes in a message may disagree, because it rounds them."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Bytes that a message or snapshot states, or None.

    - ``requested``: the allocation that failed.
    - ``allocated``, ``cached``: PyTorch's tensors, and memory that it reserved beyond them.
    - ``process``: of this process on the GPU, or its host memory if the kernel ended it.
    - ``others``: of each other process, by its number.
    - ``limit``: what the process may take, by ``set_per_process_memory_fraction``.
    - ``below``: bytes by which the stated free memory lies below zero (an underflow).
    """

    gpu: str = ""
    requested: int | None = None
    capacity: int | None = None
    free: int | None = None
    process: int | None = None
    allocated: int | None = None
    cached: int | None = None
    limit: int | None = None
    below: int = 0
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """True if PyTorch's own numbers are there."""
        return self.allocated is not None and self.requested is not None

    @property
    def beside(self) -> int:
        """Bytes of other processes."""
        return sum(self.others.values())

    @property
    def pool(self) -> int:
        """Bytes that PyTorch reserved."""
        return (self.allocated or 0) + (self.cached or 0)

    @property
    def total(self) -> int:
        """Bytes of the card; of a snapshot, what PyTorch reserved and what was free."""
        return self.capacity or self.pool + (self.free or 0)

    @property
    def context(self) -> int:
        """Bytes of this process outside of PyTorch's pool: the CUDA context and libraries."""
        return max(0, (self.process or 0) - self.pool)

    @property
    def unseen(self) -> int:
        """Bytes of the card that the message does not assign."""
        if not self.capacity:
            return 0
        used = max(self.process or 0, self.pool) + self.beside + (self.free or 0)
        return max(0, self.total - used)


def parse_size(text: str, unit: str) -> int:
    """Return bytes of ``1.70`` or ``1,70`` and a unit; all units are powers of 1024.
    MPS writes GB for GiB. Source: torch 2.13, aten/src/ATen/mps/MPSAllocator.h, ``format_size``."""
    whole, mark, part = text.rstrip(".,").replace(",", ".").rpartition(".")
    number = float(f"{whole.replace('.', '')}{mark}{part}")
    power = " KMGTPE".find(unit[0].upper()) if unit[0] not in "bB" else 0
    return int(number * 1024**power)


def read(text: str) -> Numbers:
    """Return the numbers of a message, whose lines are joined by spaces."""
    found: dict[str, int | None] = {}
    for name, forms in PATTERNS.items():
        stated = (re.search(form.format(SIZE), text, re.I) for form in forms)
        found[name] = next((parse_size(one[1], one[2]) for one in stated if one), None)
    reserved = found.pop("reserved")
    if reserved is not None and found["allocated"] is not None:
        found["cached"] = max(0, reserved - found["allocated"])
    elsewhere = found.pop("elsewhere")
    if elsewhere is not None and found["free"] is None and found["capacity"]:
        found["free"] = max(0, found["capacity"] - elsewhere - (found["allocated"] or 0))
    below = WRAPPED - (found["free"] or 0)
    if 0 <= below < WRAPPED // 2:  # a driver of an integrated GPU reports more in use than it has
        found |= {"free": 0, "below": below}
    gpu = GPU.search(text)
    others = {pid: parse_size(*size) for pid, *size in OTHER.findall(text)}
    numbers = Numbers(gpu=gpu[1] if gpu else "", others=others, **found)
    own = [(size, pid) for pid, size in others.items() if size + SLACK >= numbers.pool]
    if not own or not numbers.known or numbers.process is not None:
        return numbers
    # In a container torch does not recognise its own number. This process is the one that holds
    # the least beyond PyTorch's own memory.
    size, pid = min(own)
    others = {name: held for name, held in others.items() if name != pid}
    return replace(numbers, process=size, others=others)
