"""Attention: which kernel computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Launch, Slot, Strategy, Trained, demand
from strategies.support import forward

__all__ = ["KERNELS", "Attend"]

KERNELS = {
    "naive": None,
    "math": "MATH",
    "efficient": "EFFICIENT_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "flex": None,
}
"""Kernel -> torch's name of the backend, None where it is not one of those."""
FUSED = "aten::_scaled_dot_product_{}_attention"
WRITTEN_OUT = ("naive", "math")


def naive(q_BNTK: Any, k_BNTK: Any, v_BNTK: Any) -> Any:
    """softmax(q k^T / sqrt(K)) v, with the scores [B, N, T, T] in memory."""
    scores_BNTT = (q_BNTK * q_BNTK.shape[-1] ** -0.5) @ k_BNTK.transpose(-2, -1)
    return scores_BNTT.softmax(dim=-1) @ v_BNTK


def forced(backend: str) -> Any:
    """torch's attention with no other backend to fall back on."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    kernel = SDPBackend.__members__[backend]

    def attend(q_BNTK: Any, k_BNTK: Any, v_BNTK: Any) -> Any:
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(q_BNTK, k_BNTK, v_BNTK)

    return attend


def flex() -> Any:
    """torch's flex_attention, compiled into one fused kernel."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@dataclass(frozen=True, kw_only=True)
class Attend(Strategy):
    """Forces one attention kernel: ``naive`` keeps the full score matrix, ``math`` is torch's own
    reference, ``efficient``, ``flash``, ``cudnn`` and ``flex`` are fused and keep O(tokens).
    """

    name: ClassVar[str] = "attend"
    slot: ClassVar[Slot] = Slot.ATTEND
    source: ClassVar[str] = (
        "Dao et al. 2022, FlashAttention (arXiv:2205.14135); Rabe and Staats 2021 "
        "(arXiv:2112.05682); torch.nn.attention.sdpa_kernel, flex_attention"
    )

    kernel: str = "naive"

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel is {self.kernel!r}; one of {', '.join(KERNELS)}")

    def traits(self) -> frozenset[str]:
        return frozenset({"compiled"} if self.kernel == "flex" else ())

    def requires(self, launch: Launch) -> tuple[str, ...]:
        return () if self.kernel in WRITTEN_OUT else (f"attention_{self.kernel}",)

    def refuses(self, launch: Launch) -> str | None:
        if self.kernel == "flex" and "recomputes" in launch.traits:
            return "checkpoint would recompute flex attention uncompiled; take kernel=flash"
        half = launch.device != "cuda" or "half_compute" in launch.traits
        if self.kernel in ("flash", "cudnn") and not half:
            return f"{self.kernel} takes 16 bits on GPUs; add bf16, or take kernel=efficient"
        return None

    def edit_model(self, module: Any) -> None:
        backend = KERNELS[self.kernel]
        chosen = {"naive": lambda: naive, "flex": flex}.get(self.kernel, lambda: forced(backend))()
        for attention in forward.attentions(module):
            attention.attend = chosen

    def evidence(self, trained: Trained) -> dict[str, Any]:
        ran = forward.operations(trained)
        found = {name: sum(_is(name, operation.name) for operation in ran) for name in KERNELS}
        depth, full = len(forward.attentions(trained.module)), _score_matrices(trained, ran)
        facts = {"calls": {name: count for name, count in found.items() if count}}
        facts["score_matrices"] = full
        fused = {name: count for name, count in found.items() if name not in WRITTEN_OUT and count}
        if self.kernel in WRITTEN_OUT:
            demand(not fused, f"fused kernels ran: {fused}")
            demand(full == depth, f"{full} full score matrices in {depth} layers")
            math = found["math"] or ("compiled" in trained.launch.traits and self.kernel == "math")
            demand(bool(math) == (self.kernel == "math"), f"torch's math ran {found['math']} times")
            return facts
        demand(not full, f"{full} full score matrices were made")
        demand(set(fused) == {self.kernel}, f"{fused or 'no fused kernel'} ran, not {self.kernel}")
        demand(fused[self.kernel] >= depth, f"it ran {fused[self.kernel]} times in {depth} layers")
        return facts


def _score_matrices(trained: Trained, ran: list[forward.Operation]) -> int:
    """Products that took a matrix [tokens, tokens] a head: the scores, times v.

    Where a head is as wide as there are tokens, q looks alike, and is one more a block.
    """
    tokens, attention = trained.module.grid**2, trained.module.blocks[0].attn
    square = sum(o.name == "aten::bmm" and o.shapes[0][1:] == [tokens, tokens] for o in ran)
    alike = attention.qkv.in_features // attention.num_heads == tokens
    return square // 2 if alike else square


def _is(kernel: str, operation: str) -> bool:
    """Whether a profiled operation is the forward of ``kernel``."""
    if kernel == "flex":
        return operation.startswith("triton_") and "flex_attention" in operation
    if kernel == "math":  # its softmax knows of rows that are masked throughout
        return operation == "aten::_safe_softmax"
    name = FUSED.format(kernel)
    return operation in (name, f"{name}_for_cpu")
