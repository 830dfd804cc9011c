"""What the closed form is made of: a recipe on a model, in elements and bytes. No torch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from harness.resolve import Resolved
from strategies.base import Sizes as Sizes_
from strategies.base import Slot
from strategies.engines.zero.config import buffer_sizes
from tests.oracle.layers import Layer, elements, layers

__all__ = ["ENTERED", "FLOW_TAIL", "Sizes", "Widths", "sizes"]


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes per element of [B, T, D], counted from the model's tensors.

    Attributes:
        kept: by a block for backward.
        stream: of the residual stream.
        head: kept beside the blocks at the loss: the first block's input, the last norm and what
            is modulated from it.
        final: the same and intermediate results while the final layer's backward runs.
        open: what a block still keeps, and its intermediate results, when the gradient of one of
            its layers is computed.
        behind: the same after that, while the gradient is reduced.
        condition: a block's modulation, per element of [B, D].
        tail: the loss, per element of the latents.
    """

    kept: float
    stream: float
    head: float
    final: float
    open: dict[str, float]
    behind: dict[str, float]
    condition: float
    tail: float


# Residual stream, norm, modulated norm, qkv (3), attention, projection, stream, norm, modulated
# norm, fc1 (4), gelu (4), fc2: twenty elements. When fc2's gradient is computed the stream and
# fc2's output are gone; the gradients of the stream, of fc2's input (4) and a product of the
# modulation are there. Behind it fc2's input is gone too, and so on through the block.
# ENTERED: how many of the twenty are there when forward enters a layer.
ENTERED = {"adaLN": 0, "qkv": 2, "proj": 6, "fc1": 10, "fc2": 18}
OPEN = {"fc2": 24, "fc1": 16, "proj": 9, "qkv": 7, "adaLN": 2}
BEHIND = {"fc2": 20, "fc1": 11, "proj": 8, "qkv": 3, "adaLN": 2}
FULL = Widths(
    kept=80, stream=4, head=12, final=24, condition=36, tail=90,
    open={name: 4 * count for name, count in OPEN.items()},
    behind={name: 4 * count for name, count in BEHIND.items()},
)  # fmt: skip
HALF = Widths(
    kept=40, stream=2, head=6, final=12, condition=18, tail=92,
    open={name: 2 * count for name, count in OPEN.items()},
    behind={name: 2 * count for name, count in BEHIND.items()},
)  # fmt: skip
# Under autocast the stream and the norms stay float32; CUDA's also turns what addcmul takes into
# float32, and that is kept beside the bfloat16 original.
AUTOCAST = Widths(
    kept=52, stream=4, head=10, final=24, condition=24, tail=90,
    open={"fc2": 61, "fc1": 44, "proj": 32, "qkv": 22, "adaLN": 12}, behind={},
)  # fmt: skip
AUTOCAST_CPU = Widths(
    kept=48, stream=4, head=10, final=24, condition=24, tail=90,
    open={"fc2": 57, "fc1": 40, "proj": 28, "qkv": 22, "adaLN": 12}, behind={},
)  # fmt: skip
FLOW_TAIL = 24
"""Bytes of the flow objective's loss per element of the latents; its graph is short."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A recipe in numbers.

    Attributes:
        tokens: elements of [B, T, D]; ``scores``: of [B, T, heads]; ``rows``: of [B, T];
            ``conditions``: of [B, D]; ``latents``: of a micro batch; ``drawn``: of the noise, which
            is drawn for 256 samples of a step at a time.
        resident: bytes of a dataset that lives on the device.
        weight: bytes of a stored weight.
        copies: whether autocast keeps bfloat16 copies of float32 weights.
    """

    resolved: Resolved
    layers: tuple[Layer, ...]
    widths: Widths
    tokens: int
    scores: int
    rows: int
    conditions: int
    latents: int
    drawn: int
    resident: int
    weight: int
    copies: bool

    @property
    def depth(self) -> int:
        return self.resolved.subject.shape.depth

    @property
    def stage(self) -> int:
        """ZeRO's; 0 without it."""
        return getattr(self.resolved.launch.engine, "stage", 0)

    @functools.cached_property
    def trained(self) -> int:
        """Elements that take gradients."""
        return elements(self.layers)

    @property
    def frozen(self) -> int:
        """Elements of the position table."""
        return self.rows // self.resolved.micro_batch * self.resolved.subject.shape.hidden_size

    @property
    def ways(self) -> int:
        """Ranks among which the optimizer is shared out."""
        return self.resolved.spec.ranks if self.stage else 1

    @property
    def share(self) -> int:
        """Elements that this rank's optimizer owns."""
        return -(-self.trained // self.ways)

    @property
    def accumulates(self) -> bool:
        return self.resolved.recipe.accumulation > 1

    @property
    def gloo(self) -> bool:
        """Whether the ranks talk by gloo, which copies what it reduces."""
        return self.resolved.spec.device != "cuda"

    @property
    def offloads(self) -> bool:
        """Whether the optimizer lives elsewhere."""
        return "host_optimizer" in self.resolved.launch.traits

    @property
    def averaged(self) -> bool:
        """Whether the weight average lives on the device."""
        place = getattr(self.resolved.recipe.in_slot(Slot.AVERAGE), "place", "none")
        return place == "device"

    @property
    def segment(self) -> int:
        """Blocks that are recomputed together; 0 without recomputation."""
        part = self.resolved.recipe.in_slot(Slot.RECOMPUTE)
        if part is None:
            return 0
        every = getattr(part, "every", 1)
        return round(math.sqrt(self.depth)) if every == "sqrt" else min(int(every), self.depth)

    @functools.cached_property
    def zero(self) -> dict[str, int]:
        """DeepSpeed's buffer sizes, in elements."""
        block = sum(layer.size for layer in self.layers if layer.block == 0)
        largest = max(layer.weight for layer in self.layers)
        bias = max(layer.bias for layer in self.layers)
        return buffer_sizes(Sizes_(self.trained, block, largest, bias), self.buckets)

    @property
    def overlaps(self) -> bool:
        """Whether ZeRO reduces beside backward: our files say so on GPUs."""
        return bool(self.stage) and self.resolved.spec.device == "cuda"

    @property
    def buckets(self) -> int:
        """Buckets of stages 1 and 2: one is filled while the other is on its way."""
        return 2 if self.overlaps and self.stage < 3 else 1


def sizes(resolved: Resolved) -> Sizes:
    """The sizes of a recipe that is known part by part."""
    shape, facts, batch = resolved.subject.shape, resolved.subject.data, resolved.micro_batch
    tokens, d = shape.tokens(facts.input_size), shape.hidden_size
    half = any(part.name == "bf16" for part in resolved.recipe.strategies)
    engine, on_gpu = "float_master" in resolved.launch.traits, resolved.spec.device == "cuda"
    autocast = AUTOCAST if on_gpu else AUTOCAST_CPU
    latent = facts.channels * facts.input_size**2
    lives = on_gpu and resolved.spec.data.partition(":")[0] in ("synthetic", "digits")
    return Sizes(
        resolved=resolved,
        layers=tuple(layers(resolved)),
        widths=FULL if not half else HALF if engine else autocast,
        tokens=batch * tokens * d,
        scores=batch * tokens * shape.num_heads,
        rows=batch * tokens,
        conditions=batch * d,
        latents=batch * latent,
        drawn=min(resolved.spec.global_batch, 256) * latent,
        resident=facts.size * (4 * latent + 8) if lives else 0,
        weight=2 if half and engine else 4,
        copies=half and not engine,
    )
