"""Memory snapshots in torch's format, replayed by a small caching allocator with known causes."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

MIB = 2**20
SITE = "/venv/lib/python3.11/site-packages/"
STACKS = {
    "model, as loaded": [(f"{SITE}torch/nn/modules/module.py", 1369, "_apply"),
                         ("/home/u/train.py", 20, "main")],
    "activations": [(f"{SITE}torch/nn/functional.py", 9, "gelu"),
                    ("/home/u/models/dit.py", 77, "forward"),
                    (f"{SITE}torch/nn/modules/module.py", 1747, "_call_impl"),
                    ("/home/u/train.py", 40, "main")],
    "optimizer state": [(f"{SITE}torch/optim/adamw.py", 127, "_init_group"),
                        ("/home/u/train.py", 45, "main")],
    "backward or C++, no Python stack": [],
}  # fmt: skip
"""What an allocation holds, as the reader names it -> its stack, innermost first."""


def frames(kind: str) -> list[dict[str, Any]]:
    """The stack of an allocation as torch writes it."""
    return [dict(filename=path, line=line, name=name) for path, line, name in STACKS[kind]]


class Allocator:
    """A card of ``capacity`` bytes under a caching allocator that writes torch's trace."""

    def __init__(self, capacity: int) -> None:
        self.free = capacity
        self.segments: list[dict[str, Any]] = []
        self.trace: list[dict[str, Any]] = []
        self.next = 2**33
        self.held: Counter[str] = Counter()

    def _event(self, action: str, addr: int, size: int, stack: Any = ()) -> None:
        event = {"action": action, "addr": addr, "size": size, "stream": 0, "frames": stack}
        self.trace.append(event)

    def alloc(self, size: int, kind: str) -> dict[str, Any]:
        """Take a block, of a free piece or of a new segment; raise MemoryError if neither is."""
        block = next((b for s in self.segments for b in s["blocks"]
                      if b["state"] == "inactive" and b["size"] >= size), None)  # fmt: skip
        if block is None and size > self.free:
            oom = {"action": "oom", "size": size, "device_free": self.free, "stream": 0}
            self.trace.append({**oom, "frames": frames(kind)})
            raise MemoryError
        if block is None:
            block = {"address": self.next, "size": size, "state": "inactive"}
            self._event("segment_alloc", self.next, size)
            self.segments.append({
                "device": 0, "address": self.next, "total_size": size, "stream": 0,
                "segment_type": "large", "blocks": [block],
            })  # fmt: skip
            self.next, self.free = self.next + size, self.free - size
        self._split(block, size)
        block |= {"state": "active_allocated", "requested_size": size, "frames": frames(kind)}
        self._event("alloc", block["address"], size, block["frames"])
        self.held[kind] += size
        return block | {"kind": kind}

    def _split(self, block: dict[str, Any], size: int) -> None:
        rest = block["size"] - size
        if rest:
            (own,) = (s["blocks"] for s in self.segments if any(b is block for b in s["blocks"]))
            at = next(i for i, one in enumerate(own) if one is block)
            piece = {"address": block["address"] + size, "size": rest, "state": "inactive"}
            own.insert(at + 1, piece | {"frames": []})
            block["size"] = size

    def release(self, handle: dict[str, Any]) -> None:
        """Free a block; its segment stays reserved."""
        (block,) = (b for s in self.segments for b in s["blocks"]
                    if b["address"] == handle["address"])  # fmt: skip
        block["state"] = "inactive"
        for action in ("free_requested", "free_completed"):
            self._event(action, block["address"], block["size"])
        self.held[handle["kind"]] -= block["size"]

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return sum(segment["total_size"] for segment in self.segments)

    def empty_cache(self) -> None:
        """Give back the segments without a block in use."""
        for segment in list(self.segments):
            if all(block["state"] == "inactive" for block in segment["blocks"]):
                self.segments.remove(segment)
                self._event("segment_free", segment["address"], segment["total_size"])

    def snapshot(self) -> dict[str, Any]:
        """The whole state, as ``torch.cuda.memory._snapshot`` returns it."""
        return {"segments": self.segments, "device_traces": [self.trace], "allocator_settings": {}}


def run_out(cause: str, seed: int) -> tuple[dict[str, Any], Counter[str], tuple[int, int]]:
    """Run out of memory by ``cause``; return the snapshot, and the bytes held then, reserved and
    free.

    Afterwards everything but the model is freed, as the exception and its handler do.
    """
    draw, card = random.Random(seed), Allocator(4096 * MIB)
    card.alloc(1024 * MIB, "model, as loaded")
    taken: list[dict[str, Any]] = []
    kinds = {"full": "activations", "state": "optimizer state", "pieces": "activations"}
    try:
        if cause == "state":
            taken = [card.alloc(768 * MIB, "activations") for _ in range(2)]
            for one in taken:
                card.release(one)
            taken = [card.alloc(512 * MIB, "backward or C++, no Python stack")]
        while cause != "pieces":
            taken.append(card.alloc(draw.randrange(8, 160) * MIB, kinds[cause]))
        big = card.alloc(2816 * MIB, "activations")
        card.release(big)
        taken = [card.alloc(64 * MIB, "activations") for _ in range(44)]
        for one in taken[::2]:
            card.release(one)
        taken = taken[1::2]
        card.alloc((320 + draw.randrange(64)) * MIB, "activations")
    except MemoryError:
        held, rest = +card.held.copy(), (card.reserved, card.free)
    for one in taken:
        card.release(one)
    card.empty_cache()
    return card.snapshot(), held, rest
