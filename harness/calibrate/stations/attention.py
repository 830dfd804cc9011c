"""FLOP/s of each kernel of attention at heads of 64 and 72, and what its backward takes beside."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.calibrate.stations.asked import Asked, reason, seconds_of
from harness.predict.workspace import scratch

__all__ = ["measure"]

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
HERE = {
    "cuda": (("bfloat16", "float16", "float32"), tuple(KERNELS)),
    "cpu": (("float32", "bfloat16"), ("flash", "math")),
}
"""Device -> types and kernels that it may have."""
WIDTHS = (64, 72)
"""Of a head: DiT-S, B and L have 64, DiT-XL 72."""
SHAPE = {"cuda": (32, 16, 256), "cpu": (8, 6, 256)}
SMALL_SHAPE = (2, 2, 64)
PASSES = 14
"""Products of T x T x K, times two, that forward (2) and backward (5) take together, as torch's
FLOP counter has them."""
OPERATION = "aten._scaled_dot_product_{}_attention_backward.default"


def measure(asked: Asked) -> dict[str, Any]:
    """``attention``: a rate for each kernel, type and width; ``missing``: the others, and why."""
    types, kernels = HERE[asked.device.type]
    found, missing = [], {}
    for kernel in kernels:
        for dtype in types:
            for width in WIDTHS:
                try:
                    found.append(_rate(kernel, dtype, width, asked))
                except Exception as error:  # a kernel that does not take this is an answer
                    missing[f"{kernel} {dtype} {width}"] = reason(error)
    return {"attention": found, "missing": missing}


def _rate(kernel: str, dtype: str, width: int, asked: Asked) -> dict[str, Any]:
    batch, heads, tokens = SMALL_SHAPE if asked.small else SHAPE[asked.device.type]
    shape = (batch, heads, tokens, width)
    kind = getattr(torch, dtype)
    qkv = [asked.random(*shape, dtype=kind, requires_grad=True) for _ in range(3)]
    grad = asked.random(*shape, dtype=kind)

    def step() -> None:
        out = functional.scaled_dot_product_attention(*qkv)
        torch.autograd.grad(out, qkv, grad)

    with sdpa_kernel(KERNELS[kernel]):
        seconds = seconds_of(step, asked)
        taken = _scratch(qkv, grad) if asked.on_gpu else None
    row = {"kernel": kernel, "dtype": dtype, "width": width}
    row["rate"] = PASSES * batch * heads * tokens**2 * width / seconds
    formula = scratch(OPERATION.format(kernel), [shape, shape]) if asked.on_gpu else None
    return {**row, "scratch_bytes": taken, "formula_bytes": formula}


def _scratch(qkv: list[torch.Tensor], grad: torch.Tensor) -> int:
    """What a backward held at most beside its three results."""
    out = functional.scaled_dot_product_attention(*qkv)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, qkv, grad)
    held = sum(g.untyped_storage().nbytes() for g in grads)
    return max(0, torch.cuda.max_memory_allocated() - before - held)
