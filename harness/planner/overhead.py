"""Memory of kernels and libraries that a trace does not see, attention kernels, and trace limits.
``scratch``: bytes that a kernel holds while it runs. ``standing``: workspaces, the CUDA context and
communication buffers; typical figures unless the card was calibrated. Does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.planner.calibration.record import StandingBytes
from harness.system.cards import Card
from strategies.base import BadInput
from strategies.strategy import Strategy

MIB = 2**20
FLOAT = 4


def scratch(op: str, shapes: Sequence[Sequence[int]]) -> int:
    """Return the bytes that a CUDA kernel of ``op`` allocates and frees inside.
    ``shapes`` are those of its inputs. Flash attention's backward sums dQ in float32, padded to its
    tiles, with one number per row. Source: torch 2.13,
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (mha_bwd). cuDNN's does the same
    without padding; the library may take more, which is not published. Source: cudnn-frontend 1.23,
    node/scaled_dot_product_flash_attention.h (dQ_accum, softmax_sum). Torch allocates both from the
    caching allocator (aten/src/ATen/native/cudnn/MHA.cpp)."""
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
    """Fixed bytes of a training on every GPU, beside its tensors.
    ``libraries`` comes from the caching allocator; ``context`` and ``communication`` do not."""

    libraries: int
    context: int
    communication: int

    @property
    def total(self) -> int:
        return self.libraries + self.context + self.communication


def libraries(gpu: Card | None) -> int:
    """Return the bytes that libraries take from the caching allocator. None is an unknown card.
    cuBLAS allocates one workspace per handle, and the forward thread and the autograd thread have
    one handle each."""
    if gpu and gpu.shared:
        return 0
    return _or(measured(gpu).libraries, 2 * workspace(bool(gpu and gpu.hopper)))


def workspace(hopper: bool) -> int:
    """Return the bytes of a workspace of cuBLAS, on a card with or without ``Card.hopper``.
    Source: torch 2.13, aten/src/ATen/cuda/CublasHandlePool.cpp."""
    return int((32 if hopper else 8.125) * MIB)


def fixed_overhead(gpu: Card | None, processes: int, sharding: str = "") -> FixedOverhead:
    """Return the fixed overhead of a training of ``processes`` ranks.
    ``sharding`` is the name of the recipe's, as zero2_offload: DeepSpeed makes NCCL's groups for
    one process too, and ZeRO-1 and 2 make one more."""
    known, zero = measured(gpu), sharding.startswith("zero")
    groups = _or(known.communication, NCCL) if processes > 1 or zero else 0
    more = NCCL_ZERO2 if sharding.startswith(("zero1", "zero2")) else 0
    return FixedOverhead(
        libraries=libraries(gpu),
        context=_or(known.context, context(gpu)),
        communication=0 if gpu and gpu.shared else groups + more,
    )


INTERPRETER = 450 * MIB
"""Bytes of a CPU process before it has a model: Python with torch and its libraries."""
KERNELS = 240 * MIB
"""Bytes that the kernels of one training step add to a CUDA context when they are first loaded."""
CONTEXTS = {True: 518 * MIB, False: 450 * MIB}
"""Whether a card has ``Card.hopper`` -> bytes of a bare CUDA context. Only the first was measured,
as ``KERNELS`` was: on an H100 (docs/explanation/accuracy.md)."""
NCCL = 600 * MIB
"""Bytes of NCCL's first group. 544 and 688 MiB were seen on A100, for groups of 2 and of more
(github.com/NVIDIA/nccl/issues/964), and 566 on an H100 for DeepSpeed's group of one."""
NCCL_ZERO2 = 390 * MIB
"""Bytes that DeepSpeed's ZeRO-1 and 2 add to them, on the same H100."""


def context(gpu: Card | None) -> int:
    """Return the typical bytes of a CUDA context during a training, or of a CPU's interpreter."""
    if gpu and gpu.shared:
        return INTERPRETER
    return CONTEXTS[bool(gpu and gpu.hopper)] + KERNELS


def measured(gpu: Card | None) -> StandingBytes:
    """Return the overhead that the card's calibration measured; empty without a calibration."""
    found = gpu.calibrated if gpu else None
    return found.calibration.standing if found else StandingBytes()


def _or(size: int | None, typical: int) -> int:
    return typical if size is None else size


# ---- Attention kernels ----
# The kernel that torch takes, by compute capability. Source: torch 2.13,
# aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. Flash attention and cuDNN's begin with
# capability 8.0, as does bfloat16 in memory-efficient attention.
#
# On 9.x and 10.x cuDNN comes first (``check_prefer_cudnn_attention``) if cuDNN is above 9.15 and
# TORCH_CUDNN_SDPA_DEPRIORITIZED is not set. Torch's CUDA 13 wheels have such a cuDNN; those of CUDA
# 12 do not. A plan assumes the former and prints that; a measured row records the kernel
# (``taken``).


ORDERS = {
    "efficient": ("efficient", "math"),
    "flash": ("flash", "efficient", "math", "cudnn"),
    "cudnn": ("cudnn", "flash", "efficient", "math"),
}
"""Kind of card, named by its preferred kernel for 16 bits -> its kernels, in torch's order."""
WORDS = {
    "efficient": "memory-efficient (flash begins with compute capability 8.0)",
    "flash": "flash for 16 bits, memory-efficient for float32",
    "cudnn": "cuDNN's for 16 bits (flash, where cuDNN is older than that of torch's CUDA 13 "
    "wheels), memory-efficient for float32",
}
"""Kind of card -> description of its attention kernels."""
USUAL = "flash"
"""Kind of a card whose compute capability is unknown."""
HALF = ("float16", "bfloat16")
WIDEST = {"flash": 256, "cudnn": 128}
"""Kernel -> its largest head width."""
FUSED = "aten._scaled_dot_product_{}_attention.default"
SOFTMAX = "aten._safe_softmax.default"
"""Operation that identifies torch's plain products (the math kernel)."""
BACKENDS = {"CUDNN_ATTENTION": "cudnn", "FLASH_ATTENTION": "flash"}


class NoKernel(BadInput):
    """No allowed kernel can compute this attention."""


def preferred(capability: tuple[int, int] | None) -> str:
    """Return the kind of a card, a key of ``ORDERS``, by its compute capability."""
    if capability is None:
        return USUAL
    if capability < (8, 0):
        return "efficient"
    return "cudnn" if capability[0] in (9, 10) else "flash"


def taken(environment: Mapping[str, Any]) -> str:
    """Return the kind of card that a row was measured on, by the kernel that torch took there."""
    backends = environment.get("attention")
    return BACKENDS.get(backends["float16"], "efficient") if backends else USUAL


def choose(kind: str, dtype: str, width: int, masked: bool, allowed: Collection[str]) -> str:
    """Return the first allowed kernel in ``kind``'s order that takes heads of ``width``.

    Raises:
        NoKernel: no allowed kernel does; torch would find none either.
    """
    for name in ORDERS[kind]:
        if name in allowed and _takes(name, kind, dtype, width, masked):
            return name
    only = " or ".join(sorted(allowed)) or "no"
    raise NoKernel(
        f"{only} attention does not take {dtype} heads of {width} on such a card; naive and math do"
    )


def of_operations(names: Iterable[str]) -> list[str]:
    """Return the names of torch's attention kernels that ran, by the operations of a trace."""
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


# ---- Limits of tracing ----
# Reasons why a recipe cannot be traced. They are read only after a trace has failed, so an entry
# has no effect once its library runs without storage.


HOOK = "{name} hooks into DDP's C++ reducer, which needs real memory"
COMPILED = "torchao compiles the step of {name}, and torch compiles only tensors with memory"

LIMITS = {
    "adam4bit": COMPILED,
    "adam16bit": COMPILED,
    "adam8bit:lib=torchao": COMPILED,
    "compress": HOOK,
    "topk": HOOK,
    "paged_adam8bit": "{name} allocates pages by the CUDA driver, and a prediction has no driver",
}
"""Strategy, by name or text -> why a training with ``{name}`` cannot be traced."""


class NoTrace(RuntimeError):
    """A trace would be wrong; the message gives the reason."""


def why(parts: Iterable[Strategy], raised: str) -> str:
    """Return the limits that ``parts`` meet, as a sentence, or the kind of exception if none is
    known."""
    met = [(part.name, LIMITS.get(str(part)) or LIMITS.get(part.name)) for part in parts]
    known = [limit.format(name=name) for name, limit in met if limit]
    return "; ".join(known) or f"a library failed on tensors without storage ({raised})"
