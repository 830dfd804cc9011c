"""What kernels and libraries take beside the tensors that a trace sees. No torch.

Inside an op (``scratch``): bytes held while its kernel runs. Beside the training (``standing``):
workspaces, the CUDA context and communication buffers, which no trace shows; the figures of the
last two are typical ones, where the card was not calibrated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.planner.calibration.record import StandingBytes
from harness.planner.speed.cards import Card
from strategies.base import BadInput
from strategies.strategy import Strategy

MIB = 2**20
FLOAT = 4


def scratch(op: str, shapes: Sequence[Sequence[int]]) -> int:
    """Bytes that a CUDA kernel of ``op`` allocates and frees inside; shapes are its inputs'.

    Flash attention's backward sums dQ in float32, padded to its tiles, with one number a row.
    Source: torch 2.13, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (mha_bwd).
    cuDNN's does the same unpadded; its library may take more, of which nothing is published.
    Source: cudnn-frontend 1.23, node/scaled_dot_product_flash_attention.h (dQ_accum, softmax_sum);
    torch gives both out of the caching allocator (aten/src/ATen/native/cudnn/MHA.cpp).
    """
    if op == "aten._scaled_dot_product_flash_attention_backward.default":
        batch, heads, tokens, width = shapes[1]
        rows = batch * heads * _up(tokens, 128)
        return FLOAT * rows * (_up(width, 32) + 1)
    if op == "aten._scaled_dot_product_cudnn_attention_backward.default":
        batch, heads, tokens, width = shapes[1]
        return FLOAT * batch * heads * tokens * (width + 1)
    if op == "aten._scaled_dot_product_efficient_attention_backward.default":
        batch, heads, tokens, _ = shapes[1]
        return FLOAT * batch * heads * _up(tokens, 32)
    return 0


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True, kw_only=True)
class FixedOverhead:
    """Bytes that stand beside the training on every GPU. ``libraries`` comes out of the caching
    allocator, the other two do not."""

    libraries: int
    context: int
    communication: int

    @property
    def total(self) -> int:
        return self.libraries + self.context + self.communication


def libraries(gpu: Card | None) -> int:
    """What libraries take out of the caching allocator; None is a card that is not in the table.

    cuBLAS: one workspace a handle, and the forward and the autograd thread have one each
    (torch 2.13, aten/src/ATen/cuda/CublasHandlePool.cpp: 8.125 MiB, 32 MiB from Hopper on).
    """
    if gpu and gpu.shared:
        return 0
    typical = int(2 * (32 if gpu and gpu.hopper else 8.125) * MIB)
    return _or(measured(gpu).libraries, typical)


def standing(gpu: Card | None, processes: int) -> FixedOverhead:
    """What stands beside a training of ``processes`` ranks."""
    known = measured(gpu)
    return FixedOverhead(
        libraries=libraries(gpu),
        context=_or(known.context, 450 * MIB),
        communication=0 if processes == 1 else _or(known.communication, 300 * MIB),
    )


def measured(gpu: Card | None) -> StandingBytes:
    """What the card's calibration knows of it; nothing of one without."""
    found = gpu.calibrated if gpu else None
    return found.calibration.standing if found else StandingBytes()


def _or(size: int | None, typical: int) -> int:
    return typical if size is None else size


# ---- attention ----
# Attention on a card: which kernel torch takes, by its compute capability. No torch.
#
# Source: torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. Flash attention and
# cuDNN's begin with compute capability 8.0, as does bfloat16 in memory-efficient attention. On 9.x
# and 10.x cuDNN comes first (``check_prefer_cudnn_attention``): the file asks for a cuDNN above
# 9.15, which torch's wheels of CUDA 13 bring and those of CUDA 12 do not, and for no
# TORCH_CUDNN_SDPA_DEPRIORITIZED. That those wheels are installed is an assumption, and a plan says
# so; beside a measured row stands what torch took there (``taken``).


ORDERS = {
    "efficient": ("efficient", "math"),
    "flash": ("flash", "efficient", "math", "cudnn"),
    "cudnn": ("cudnn", "flash", "efficient", "math"),
}
"""The kernel that a kind of card prefers for 16 bits -> its kernels, in torch's order."""
WORDS = {
    "efficient": "memory-efficient (flash begins with compute capability 8.0)",
    "flash": "flash for 16 bits, memory-efficient for float32",
    "cudnn": "cuDNN's for 16 bits (flash, where cuDNN is older than that of torch's CUDA 13 "
    "wheels), memory-efficient for float32",
}
"""Kind of card -> how it computes attention, in a sentence."""
USUAL = "flash"
"""The kind of a card whose compute capability is not known."""
HALF = ("float16", "bfloat16")
WIDEST = {"flash": 256, "cudnn": 128}
"""Kernel -> the widest head that it takes."""
FUSED = "aten._scaled_dot_product_{}_attention.default"
SOFTMAX = "aten._safe_softmax.default"
"""What torch's plain products are known by."""
BACKENDS = {"CUDNN_ATTENTION": "cudnn", "FLASH_ATTENTION": "flash"}


class NoKernel(BadInput):
    """No kernel that is allowed can compute this attention."""


def preferred(capability: tuple[int, int] | None) -> str:
    """The kind of a card: a key of ``ORDERS``."""
    if capability is None:
        return USUAL
    if capability < (8, 0):
        return "efficient"
    return "cudnn" if capability[0] in (9, 10) else "flash"


def taken(environment: Mapping[str, Any]) -> str:
    """The kind of the card that a row was measured on, by what torch took there."""
    backends = environment.get("attention")
    return BACKENDS.get(backends["float16"], "efficient") if backends else USUAL


def choose(kind: str, dtype: str, width: int, masked: bool, allowed: Collection[str]) -> str:
    """The first kernel of ``kind``'s order that is allowed and takes heads of ``width``.

    Raises:
        NoKernel: where torch would find none either.
    """
    for name in ORDERS[kind]:
        if name in allowed and _takes(name, kind, dtype, width, masked):
            return name
    only = " or ".join(sorted(allowed)) or "no"
    raise NoKernel(
        f"{only} attention does not take {dtype} heads of {width} on such a card; naive and math do"
    )


def of_operations(names: Iterable[str]) -> list[str]:
    """The kernels of torch's attention among the operations of a trace."""
    ran = set(names)
    known = {name: SOFTMAX if name == "math" else FUSED.format(name) for name in ORDERS["cudnn"]}
    return [name for name, operation in known.items() if operation in ran]


def _takes(name: str, kind: str, dtype: str, width: int, masked: bool) -> bool:
    half, old = dtype in HALF, kind == "efficient"
    if name == "flash":
        return half and not masked and width <= WIDEST[name]
    if name == "cudnn":
        return half and width <= WIDEST[name] and width % 8 == 0
    if name == "efficient":
        aligned = width % (8 if half else 1 if old else 4) == 0
        return aligned and (half or dtype == "float32") and not (old and dtype == "bfloat16")
    return True


# ---- limits ----
# What no trace can follow, and why: a sentence for each part of a recipe at which one stops.
#
# Looked up only after a trace has failed: once a library can do without storage, the trace
# succeeds and its sentence here is not used. No torch.


HOOK = "{name} hooks into DDP's reducer, which is C++ and wants real bytes"
COMPILED = "torchao compiles the step of {name}, which torch cannot do without storage"

LIMITS = {
    "adam4bit": COMPILED,
    "adam8bit:lib=torchao": COMPILED,
    "compress": HOOK,
    "onebit_adam": HOOK,
    "topk": HOOK,
    "paged_adam8bit": "{name} takes pages from the CUDA driver, and a prediction has none",
}
"""A part, by its name or its text -> why a training with ``{name}`` is not traced."""


class NoTrace(RuntimeError):
    """A trace that would be wrong; the message says to a person why."""


def why(parts: Iterable[Strategy], raised: str) -> str:
    """The limits that ``parts`` meet, in a sentence; if none is known, the kind of exception."""
    met = [(part.name, LIMITS.get(str(part)) or LIMITS.get(part.name)) for part in parts]
    known = [limit.format(name=name) for name, limit in met if limit]
    return "; ".join(known) or f"a library failed on tensors without storage ({raised})"
