"""Lattice of recipes among which ``plan`` searches the fastest: the valid products of its axes.
No torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from harness.resolve import Resolved
from strategies.base import BadInput, Slot
from strategies.streaming.block_swap import AT_ONCE, spread
from strategies.subject import Subject

ADAPTED = "frozen_weights"
"""The trait of recipes that train only part of the weights."""
SHARDINGS = {
    False: ("single", "zero2_offload", "zero3_offload"),
    True: ("ddp", "fsdp2", "zero2", "zero3", "fsdp2_offload", "zero2_offload", "zero3_offload"),
}
"""Several GPUs -> shardings, those that move the fewest bytes first."""
OFFLOADED = "_offload"
"""End of the names of shardings that keep weights or optimizer state in host memory."""
FOR_WHOLE = ("zero2", "zero2_offload")
"""Shardings that share or move gradients and optimizer state alone, of which adapters have few."""
PRODUCTS, WHOLE = "checkpoint:keep=products", "checkpoint"
"""Recomputation of all but matrix products, and of whole blocks.
Adapters skip the first: it keeps outputs of frozen products that their backward does not need."""
PARTS = tuple(f"checkpoint:share={share:g}" for share in (0.25, 0.5, 0.75))
"""Recomputation of a share of the blocks, if none of them is streamed and no engine offloads."""
LAYERS = tuple(f"checkpoint:part={part}" for part in ("ffn", "attention"))
"""Recomputation of these layers of each block, tried as ``PARTS`` are."""
MOVED = f"{WHOLE}+offload_activations:what=checkpoints"
"""Recomputation of whole blocks from inputs that wait in host memory."""
KEPT = ("offload_activations",)
"""Ways to keep all activations in host memory, tried as ``PARTS`` are."""
ADAPTERS = ("lora:rank=16", "cast:to=fp8+lora:rank=16", "qlora:rank=16")
"""Adapters over weights of 16, 8 and 4 bits."""
FUSED = "adafactor:write=stochastic+optimizer_in_backward"
"""Optimizer that steps streamed weights on the device, as trainers do; only with ``WHOLE``."""
OPTIMIZERS = {
    "bf16_pure": (
        "adamw",
        "adam8bit",
        "adam4bit",
        "adafactor",
        "adafactor+optimizer_in_backward",
        FUSED,
    ),
    "bf16": ("adamw", "adam8bit"),
    "fp16": ("adamw", "adam8bit"),
}
"""Precision -> optimizers with which trainers train all weights."""
UNTRACED = ("adam4bit", "dtensor_weights")
"""An optimizer, and a trait of engines with which its step cannot be traced."""
ROUNDING = ("bf16_pure", "adamw")
"""Precision and optimizer that lose small updates.
They are combined only to stream blocks, which the host steps by no other optimizer."""
SHARES = (0.25, 0.5, 0.75)
"""Shares of the blocks that may be streamed, besides all but a few."""


def lattice(
    row: Callable[[str], Resolved], several: bool, half: Sequence[str], whole_only: bool
) -> list[Resolved]:
    """Return every valid recipe of the lattice.
    ``row`` resolves a recipe and raises ``BadInput`` for an invalid one. ``half``: the 16-bit
    precisions of the card, with the purest first. ``whole_only``: without adapters."""
    found: dict[str, Resolved] = {}
    counts = swaps(row(SHARDINGS[several][0]).subject.depth)
    for sharding in SHARDINGS[several]:
        streamed = counts if _valid(row, sharding, half[-1:], [WHOLE], counts[:1]) else []
        plain = _valid(row, sharding, half[-1:], [WHOLE], [0])
        # An engine with a float32 master of what trains stores 16-bit weights itself.
        master = bool(plain) and "float_master" in plain[0].launch.traits
        known = half[-1:] if master else half
        none = whole_only or sharding in FOR_WHOLE
        columns = [] if none else [(known[0], adapter) for adapter in ADAPTERS]
        columns += [(one, optimizer) for one in known for optimizer in OPTIMIZERS[one]]
        alone = () if sharding.endswith(OFFLOADED) else (*PARTS, *LAYERS, *KEPT)
        for level in ("", *alone, PRODUCTS, WHOLE, MOVED):
            for column in columns:
                if column[1] in ADAPTERS and level == PRODUCTS:
                    continue
                fused = column[1] == FUSED
                first = [] if fused or column == ROUNDING else [0]
                if fused:
                    others = streamed if level == WHOLE else []
                else:
                    others = streamed if level not in alone and "backward" not in column[1] else []
                for one in _valid(row, sharding, column, [level], [*first, *others]):
                    if column[1] != UNTRACED[0] or UNTRACED[1] not in one.launch.traits:
                        found.setdefault(str(one.recipe), one)
    return list(found.values())


def adapts(row: Resolved) -> bool:
    """Return True if ``row`` trains adapters or other parts, False if it trains all weights."""
    return ADAPTED in row.launch.traits


def _valid(
    row: Callable[[str], Resolved],
    sharding: str,
    column: Sequence[str],
    level: Sequence[str],
    counts: Sequence[int],
) -> list[Resolved]:
    """Return the valid recipes with these numbers of streamed blocks, up to a refused one."""
    found = []
    for count in counts:
        swap = f"block_swap:blocks={count}" if count else ""
        try:
            found.append(row("+".join(filter(None, (sharding, swap, *column, *level)))))
        except BadInput:
            if count:
                break
    return found


def swaps(depth: int) -> list[int]:
    """Return the numbers of streamed blocks to try for a model of ``depth`` blocks."""
    counts = {round(share * depth) for share in SHARES} | {depth - 2 * AT_ONCE}
    return sorted(count for count in counts if AT_ONCE < count <= depth)


FLOAT, HALF = 4, 2
"""Bytes of an element."""


class Point:
    """A recipe of the lattice: its coordinates, and bytes that follow from them.
    ``share``: the share of the blocks that it recomputes. ``products``: it keeps their matrix
    products. ``part``: the layers of each block that it recomputes, or "block". ``moved``: what
    blocks keep waits in host memory. ``swapped``: the number of streamed blocks. ``column``: its
    other parts."""

    def __init__(self, row: Resolved) -> None:
        slots = (Slot.RECOMPUTE, Slot.OFFLOAD, Slot.SWAP)
        recompute, moved, swap = apart = [row.recipe.in_slot(slot) for slot in slots]
        self.row, self.label, self.traits = row, str(row.recipe), row.launch.traits
        self.share = recompute.share if recompute else 0.0
        self.products = recompute is not None and recompute.keep == "products"
        self.part = recompute.part if recompute else "block"
        self.moved = moved is not None
        self.swapped = swap.blocks if swap else 0
        parts = [part for part in row.recipe.strategies if part not in apart]
        self.column = tuple(map(str, parts))
        self.sharding = self.column[0]
        self.adapted = adapts(row)
        self.elements, self.ranks = row.subject.parameters, row.launch.processes
        self.shards = "shards" in self.traits
        self.splits = "split_parameters" in self.traits
        self.buckets = "replicas" in self.traits and not self.adapted
        """True if gradients have a second copy, in DDP's buckets."""
        self.pure = bool(self.traits & {"pure_bf16", "float_master"})
        """True if weights are stored in 16 bits."""
        self.quantized = "quantized_weights" in self.traits
        """True if frozen weights are stored in fewer bits than they compute in."""
        self.fused = not self.adapted and "frees_gradients" in self.traits
        """True if streamed weights train on the device, and return to host memory."""
        hosting = bool(self.traits & {"host_optimizer", "host_weights"})
        self.hosts_optimizer = hosting and not self.adapted
        """True if the optimizer of all weights works on the host."""
        self.hosts_weights = row.launch.engine.place("parameters") != "device"
        """True if a rank's weights wait in host memory."""
        hosts = self.hosts_weights or self.hosts_optimizer
        self.waits = bool(self.swapped) or self.moved or hosts
        """True if weights, optimizer state or activations wait in host memory."""
        self.name = "+".join(self.column)
        """Its column, as words of its recipe; ``level``: its other words."""
        self.level = "+".join(w for w in self.label.split("+") if w not in self.column)

    @property
    def kept(self) -> float:
        """An estimate of the share of a block's activations that the device keeps."""
        if self.moved:
            return 0.0
        return 0.5 if self.products or self.part != "block" else 1 - 0.95 * self.share

    @property
    def again(self) -> float:
        """An estimate of the share of the forward pass that backward repeats."""
        if self.part != "block":
            return 0.4
        return 0.2 if self.products else self.share

    def apart(self, other: Point) -> float:
        """Return how unlike two points are in what they keep and repeat, from 0 to 2."""
        return abs(self.kept - other.kept) + abs(self.again - other.again)

    @functools.cached_property
    def rounding(self) -> int:
        """Number of its roundings. Frozen weights: 1 in 8 bits, 2 in 4. Trained weights: 1 each for
        16 bits without a master and for rounded optimizer state."""
        if self.adapted:
            return {HALF / 4: 2, HALF / 2: 1}.get(self.weight_bytes, 0)
        return len(self.traits & {"pure_bf16", "rounds_state"})

    @property
    def rounds(self) -> str:
        """Words on what it rounds; empty if nothing."""
        if self.adapted:
            return {2: "4-bit weights", 1: "8-bit weights"}.get(self.rounding, "")
        found = {"rounds_state": "rounded moments", "pure_bf16": "16-bit weights"}
        return next((words for trait, words in found.items() if trait in self.traits), "")

    @functools.cached_property
    def streamed(self) -> int:
        """The most elements that wait in host memory: those of the streamed blocks but two."""
        return sum(sorted(self._swapped_sizes)[AT_ONCE:])

    @functools.cached_property
    def stepped_away(self) -> int:
        """Elements that the host's optimizer steps: those of all streamed blocks, if they train and
        are not stepped on the device."""
        return 0 if self.adapted or self.fused else sum(self._swapped_sizes)

    @property
    def _swapped_sizes(self) -> list[int]:
        sizes = _block_sizes(self.row.subject)
        return [sizes[i] for i in spread(self.swapped, len(sizes))] if self.swapped else []

    @functools.cached_property
    def weight_bytes(self) -> float:
        """The fewest bytes in which an element of the model's weights is stored."""
        if "packed_weights" in self.traits:
            return HALF / 4
        if self.quantized:
            return HALF / 2
        return HALF if self.pure else FLOAT

    @functools.cached_property
    def optimizer_bytes(self) -> float:
        """The fewest bytes of optimizer state for each element of the model's weights."""
        if self.adapted:
            return 0.0
        master = FLOAT if "float_master" in self.traits else 0
        each = HALF if "pure_bf16" in self.traits else FLOAT
        return master + (0.0 if "own_state" in self.traits else 2.0 * each)

    @functools.cached_property
    def state_bytes(self) -> float:
        """The fewest bytes of weights and optimizer state that a rank keeps on its device."""
        here, stepped = self.elements - self.streamed, self.elements - self.stepped_away
        weights = self.weight_bytes * here / (self.ranks if self.splits else 1)
        optimizer = self.optimizer_bytes * stepped / (self.ranks if self.shards else 1)
        hosted = self.traits & {"host_weights", "host_optimizer"}
        return (0.0 if self.hosts_weights else weights) + (0.0 if hosted else optimizer)

    @functools.cached_property
    def gradient_bytes(self) -> float:
        """The fewest bytes of gradients that a rank holds beside its state when it steps."""
        early = {"frees_gradients", "early_gradients", "host_weights", "host_optimizer"}
        if self.adapted or self.traits & early:
            return 0.0
        each = HALF if self.shards else self.weight_bytes
        return each * (self.elements - self.stepped_away) / (self.ranks if self.shards else 1)

    def frees(self, other: Point) -> float:
        """Return an estimate of the bytes that it frees on the device by streaming more than
        ``other``: weights, and of blocks that train their gradients, the copy in DDP's buckets and
        optimizer state."""
        waits = max(0, self.streamed - other.streamed)
        stepped = max(0, self.stepped_away - other.stepped_away)
        each = (1 + self.buckets) * self.weight_bytes + self.optimizer_bytes
        return self.weight_bytes * waits + each * stepped

    @property
    def hosted_bytes(self) -> float:
        """The fewest bytes that streaming an element of the weights keeps on the host."""
        weights = self.weight_bytes
        return weights if self.adapted or self.fused else 2 * weights + self.optimizer_bytes


@functools.cache
def _block_sizes(subject: Subject) -> tuple[int, ...]:
    return tuple(subject.block_parameters)
