"""The ways in which attention is computed, and how a model is made to take one of them."""

from __future__ import annotations

from typing import Any

__all__ = ["KERNELS", "ByKernel", "flex", "forced", "naive"]

KERNELS = {
    "naive": None,
    "math": "MATH",
    "efficient": "EFFICIENT_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "flex": None,
}
"""Kernel -> torch's name of the backend, None where it is not one of those."""


def naive(q_BNTK: Any, k_BNTK: Any, v_BNTK: Any) -> Any:
    """softmax(q k^T / sqrt(K)) v, with the scores [B, N, T, T] in memory."""
    scores_BNTT = (q_BNTK * q_BNTK.shape[-1] ** -0.5) @ k_BNTK.transpose(-2, -1)
    return scores_BNTT.softmax(dim=-1) @ v_BNTK


def only(backend: str) -> Any:
    """A context in which torch's attention has no other backend to fall back on."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.__members__[backend])


def forced(backend: str) -> Any:
    """torch's attention by that backend alone."""
    from torch.nn.functional import scaled_dot_product_attention

    def attend(q_BNTK: Any, k_BNTK: Any, v_BNTK: Any) -> Any:
        with only(backend):
            return scaled_dot_product_attention(q_BNTK, k_BNTK, v_BNTK)

    return attend


class ByKernel:
    """A way to run blocks in which torch's attention has one backend, for models whose attention
    cannot be replaced."""

    def __init__(self, inner: Any, backend: str) -> None:
        self.inner, self.backend = inner, backend

    def __call__(self, blocks: Any, *given: Any, **named: Any) -> Any:
        with only(self.backend):
            return self.inner(blocks, *given, **named)


def flex() -> Any:
    """torch's flex_attention, compiled into one fused kernel."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
