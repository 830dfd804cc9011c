"""attend: a forced attention kernel, and evidence of the kernel that ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.activations.runners import surround
from strategies.base import Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence import states
from strategies.strategy import Strategy
from strategies.subject import Subject, attentions
from strategies.workloads import BOTH

KERNELS = {
    "naive": None,
    "math": "MATH",
    "efficient": "EFFICIENT_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "flex": None,
}
"""Kernel -> torch's name of the backend; None if it is not one of torch's backends."""


def naive(q_BNTK: Any, k_BNTK: Any, v_BNTK: Any) -> Any:
    """Compute softmax(q k^T / sqrt(K)) v, with the scores [B, N, T, T] in memory."""
    scores_BNTT = (q_BNTK * q_BNTK.shape[-1] ** -0.5) @ k_BNTK.transpose(-2, -1)
    return scores_BNTT.softmax(dim=-1) @ v_BNTK


def only(backend: str) -> Any:
    """Return a context in which torch's attention has only this backend, without a fallback."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.__members__[backend])


def forced(backend: str) -> Any:
    """Return torch's attention restricted to one backend."""
    from torch.nn.functional import scaled_dot_product_attention

    def attend(q_BNTK: Any, k_BNTK: Any, v_BNTK: Any) -> Any:
        with only(backend):
            return scaled_dot_product_attention(q_BNTK, k_BNTK, v_BNTK)

    return attend


class ByKernel:
    """Block runner that restricts torch's attention to one backend, for models whose attention
    function cannot be replaced."""

    def __init__(self, inner: Any, backend: str) -> None:
        self.inner, self.backend = inner, backend

    def __call__(self, blocks: Any, *given: Any, **named: Any) -> Any:
        with only(self.backend):
            return self.inner(blocks, *given, **named)


# ---- evidence from operators ----


WRITTEN_OUT = ("naive", "math")


def calls_of(run: TrainingRun, kernel: str, ran: Sequence[Any]) -> int:
    """Return the calls of ``kernel`` among the operators of a forward pass, and demand that no
    other ran. Compiled, a written-out kernel consists of plain products."""
    calls = {name: sum(ran_by(name, r.name) for r in ran) for name in KERNELS}
    # Score matrices are products with a [queries, keys] operand a head. If a head is as wide as
    # there are keys, q has the same shape, and counts once more per layer.
    shapes = [(call.queries, call.keys, call.width) for call in run.subject.survey.attention]
    scores = {shape[:2] for shape in shapes}
    square = sum(r.name == "aten::bmm" and tuple(r.shapes[0][1:]) in scores for r in ran)
    square //= 1 + any((queries, width) in scores for queries, _, width in shapes)
    calls["naive"] = square - calls["math"]
    plain = kernel in WRITTEN_OUT and "compiled" in run.launch.traits
    allowed = WRITTEN_OUT if plain else (kernel,)
    others = {name: count for name, count in calls.items() if count and name not in allowed}
    demand(not others, f"forward ran {others}, expected {kernel}")
    return sum(calls[name] for name in allowed)


def ran_by(kernel: str, operation: str) -> bool:
    """Return whether an operator is the forward of ``kernel``."""
    if kernel == "flex":
        return operation.startswith("triton_") and "flex_attention" in operation
    if kernel == "math":  # only its softmax handles fully masked rows
        return operation == "aten::_safe_softmax"
    name = f"aten::_scaled_dot_product_{kernel}_attention"
    return operation in (name, f"{name}_for_cpu")


@dataclass(frozen=True, kw_only=True)
class Attend(Strategy):
    """Forces one attention kernel.

    ``naive`` keeps the full score matrix. ``math`` is torch's own reference. ``efficient``,
    ``flash``, ``cudnn`` and ``flex`` are fused and keep O(tokens).
    """

    name: ClassVar[str] = "attend"
    slot: ClassVar[Slot] = Slot.ATTEND
    workloads: ClassVar[tuple[str, ...]] = BOTH
    source: ClassVar[str] = (
        "Dao et al. 2022, FlashAttention (arXiv:2205.14135); Rabe and Staats 2021 "
        "(arXiv:2112.05682); torch.nn.attention.sdpa_kernel, flex_attention"
    )
    values: ClassVar[dict[str, Any]] = {"kernel": KERNELS}

    kernel: str = "naive"

    def traits(self) -> frozenset[str]:
        return frozenset({"compiled"} if self.kernel == "flex" else ())

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        return () if self.kernel in WRITTEN_OUT else (f"attention_{self.kernel}",)

    def refuses(self, launch: RunContext) -> str | None:
        hint = "take kernel=math, efficient, flash or cudnn"
        lack = KERNELS[self.kernel] is None and launch.subject.lacks("attend", hint)
        return lack or super().refuses(launch)

    def edit_model(self, module: Any, subject: Subject) -> None:
        backend: Any = KERNELS[self.kernel]
        if "attend" not in subject.parts:
            surround(module, subject, lambda inner: ByKernel(inner, backend))
            return
        if self.kernel == "flex":
            import torch
            from torch.nn.attention.flex_attention import flex_attention

            chosen = torch.compile(flex_attention)
        else:  # in the layer itself, so that a recomputed layer has it too
            chosen = naive if self.kernel == "naive" else forced(backend)
        for attention in attentions(module):
            attention.attend = chosen

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        """Return the kernel's calls in the forward of the watched step, or else in one forward."""
        subject, seen = run.subject, run.observed
        own = "attend" in subject.parts
        least = len(attentions(run.module) if own else subject.survey.attention)
        demand(least > 0, "the model does not call torch's attention")
        if not seen.ran:  # a training run, or compiled blocks
            ran = states.operations(run)
        else:
            ran = [r for r in seen.ran if r.phase == "forward"]
            least *= seen.micro_steps
        count = calls_of(run, self.kernel, ran)
        demand(count >= least, f"{self.kernel} ran {count} times in forward, expected {least}")
        return {"calls_in_forward": count}
