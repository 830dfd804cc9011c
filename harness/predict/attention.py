"""Attention on a card: which kernel torch takes, by its compute capability. No torch.

Source: torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. Flash attention and
cuDNN's begin with compute capability 8.0, as does bfloat16 in memory-efficient attention. On 9.x
and 10.x cuDNN comes first (``check_prefer_cudnn_attention``): the file asks for a cuDNN above
9.15, which torch's wheels of CUDA 13 bring and those of CUDA 12 do not, and for no
TORCH_CUDNN_SDPA_DEPRIORITIZED. That those wheels are installed is an assumption, and a plan says
so; beside a measured row stands what torch took there (``taken``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from strategies.base import BadInput

__all__ = ["ORDERS", "USUAL", "WORDS", "NoKernel", "choose", "of_operations", "preferred", "taken"]

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
