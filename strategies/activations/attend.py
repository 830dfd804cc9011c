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
from strategies.subject import Subject
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
    """Block runner that restricts torch's attention to one backend.

    It is for models whose attention function cannot be replaced.
    """

    def __init__(self, inner: Any, backend: str) -> None:
        self.inner, self.backend = inner, backend

    def __call__(self, blocks: Any, *given: Any, **named: Any) -> Any:
        with only(self.backend):
            return self.inner(blocks, *given, **named)


# ---- evidence from operators ----


WRITTEN_OUT = ("naive", "math")


def calls_of(trained: TrainingRun, kernel: str, ran: Sequence[Any], phase: str) -> int:
    """Return the calls of ``kernel`` among the operators of a phase, and demand that no other ran.

    The backward of a written-out kernel consists of plain products, and so does a compiled one.
    """
    backward = phase == "backward"
    calls = {name: sum(ran_by(name, r.name, backward) for r in ran) for name in KERNELS}
    # Score matrices are products with a [queries, keys] operand a head. If a head is as wide as
    # there are keys, q has the same shape, and counts once more per layer.
    shapes = [(call.queries, call.keys, call.width) for call in trained.subject.survey.attention]
    scores = {shape[:2] for shape in shapes}
    square = sum(r.name == "aten::bmm" and tuple(r.shapes[0][1:]) in scores for r in ran)
    square //= 1 + any((queries, width) in scores for queries, _, width in shapes)
    calls["naive"] = square - calls["math"] * (not backward)
    plain = kernel in WRITTEN_OUT and (backward or "compiled" in trained.launch.traits)
    allowed = WRITTEN_OUT if plain else (kernel,)
    others = {name: count for name, count in calls.items() if count and name not in allowed}
    demand(not others, f"{phase} of a training step ran {others}, expected {kernel}")
    return sum(calls[name] for name in allowed)


def ran_by(kernel: str, operation: str, backward: bool = False) -> bool:
    """Return whether an operator is the forward of ``kernel``.

    ``backward`` accepts its backward too, as recomputation runs the forward there.
    """
    if backward and operation.startswith("aten::_scaled_dot_product"):
        operation = operation.removesuffix("_backward")
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

    kernel: str = "naive"

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel is {self.kernel!r}; one of {', '.join(KERNELS)}")

    def traits(self) -> frozenset[str]:
        return frozenset({"compiled"} if self.kernel == "flex" else ())

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        return () if self.kernel in WRITTEN_OUT else (f"attention_{self.kernel}",)

    def refuses(self, launch: RunContext) -> str | None:
        if KERNELS[self.kernel] is None:
            lack = launch.subject.lacks("attend", "take kernel=math, efficient, flash or cudnn")
            if lack:
                return lack
        return super().refuses(launch)

    def edit_model(self, module: Any, subject: Subject) -> None:
        backend: Any = KERNELS[self.kernel]
        if "attend" not in subject.parts:
            surround(module, subject, lambda inner: ByKernel(inner, backend))
            return
        chosen = naive if self.kernel == "naive" else forced(backend)
        if self.kernel == "flex":
            import torch
            from torch.nn.attention.flex_attention import flex_attention

            chosen = torch.compile(flex_attention)
        for attention in subject.attentions(module):
            attention.attend = chosen

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        """Return the kernel's calls in each phase of the watched step, or else in one forward."""
        subject, seen, traits = trained.subject, trained.observed, trained.launch.traits
        own = "attend" in subject.parts
        depth = len(subject.attentions(trained.module) if own else subject.survey.attention)
        demand(depth > 0, "the model does not call torch's attention")
        if seen is None or not seen.ran:  # a training run, or compiled blocks
            ran: dict[str, Sequence[Any]] = {"forward": states.operations(trained)}
            wanted = {"forward": depth}
        else:
            least = depth * seen.micro_steps
            reached = min(1, least) if "some_blocks" in traits else least
            reached = 0 if traits & {"frozen_blocks", "sampling"} else reached
            wanted = {"forward": least, "backward": reached}
            ran = {phase: [r for r in seen.ran if r.phase == phase] for phase in wanted}
        facts = {}
        for phase, least in wanted.items():
            count = calls_of(trained, self.kernel, ran[phase], phase)
            demand(count >= least, f"{self.kernel} ran {count} times in {phase}, expected {least}")
            facts[f"calls_in_{phase}"] = count
        return facts
