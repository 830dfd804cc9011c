"""Attention: which kernel computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.activations.attended import (
    WRITTEN_OUT,
    in_a_step,
    layers,
    ran_by,
    score_matrices,
)
from strategies.activations.kernels import KERNELS, ByKernel, flex, forced, naive
from strategies.activations.runners import surround
from strategies.base import Slot, demand
from strategies.engine import Launch, Trained
from strategies.evidence import forward
from strategies.strategy import Strategy
from strategies.subject import Subject
from strategies.workloads import BOTH

__all__ = ["Attend"]


@dataclass(frozen=True, kw_only=True)
class Attend(Strategy):
    """Forces one attention kernel: ``naive`` keeps the full score matrix, ``math`` is torch's own
    reference, ``efficient``, ``flash``, ``cudnn`` and ``flex`` are fused and keep O(tokens).
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

    def requires(self, launch: Launch) -> tuple[str, ...]:
        return () if self.kernel in WRITTEN_OUT else (f"attention_{self.kernel}",)

    def refuses(self, launch: Launch) -> str | None:
        if KERNELS[self.kernel] is None:
            lack = launch.subject.lacks("attend", "take kernel=math, efficient, flash or cudnn")
            if lack:
                return lack
        if self.kernel in WRITTEN_OUT and "cut_queries" in launch.traits:
            return f"{self.kernel} is told by its whole score matrix; take kernel=flash, or ulysses"
        if self.kernel != "flash" and "flash_alone" in launch.traits:
            return "parts of attention are merged by what flash alone tells; take kernel=flash"
        if self.kernel == "flex" and "recomputes" in launch.traits:
            return "checkpoint would recompute flex attention uncompiled; take kernel=flash"
        half = launch.device != "cuda" or "half_compute" in launch.traits
        if self.kernel in ("flash", "cudnn") and not half:
            return f"{self.kernel} takes 16 bits on GPUs; add bf16, or take kernel=efficient"
        return None

    def edit_model(self, module: Any, subject: Subject) -> None:
        backend = KERNELS[self.kernel]
        if "attend" not in subject.parts:
            surround(module, subject, lambda inner: ByKernel(inner, backend))
            return
        chosen = {"naive": lambda: naive, "flex": flex}.get(self.kernel, lambda: forced(backend))()
        for attention in subject.attentions(module):
            attention.attend = chosen

    def evidence(self, trained: Trained) -> dict[str, Any]:
        """One forward of the blocks as they run, compiled or not; and, where its operators were
        watched, every attention of a whole training step."""
        return self._forward(trained) | in_a_step(trained, self.kernel)

    def _forward(self, trained: Trained) -> dict[str, Any]:
        ran = forward.operations(trained)
        counts = {name: sum(ran_by(name, operation.name) for operation in ran) for name in KERNELS}
        depth, full = layers(trained), score_matrices(trained, ran)
        demand(depth > 0, "no attention of torch's is called")
        facts = {"calls": {name: count for name, count in counts.items() if count}}
        facts["score_matrices"] = full
        fused = {name: count for name, count in counts.items() if name not in WRITTEN_OUT and count}
        if self.kernel in WRITTEN_OUT:
            demand(not fused, f"fused kernels ran: {fused}")
            demand(full == depth, f"{full} full score matrices in {depth} layers")
            math = counts["math"] or ("compiled" in trained.launch.traits and self.kernel == "math")
            demand(
                bool(math) == (self.kernel == "math"), f"torch's math ran {counts['math']} times"
            )
            return facts
        demand(not full, f"{full} full score matrices were made")
        demand(set(fused) == {self.kernel}, f"{fused or 'no fused kernel'} ran, not {self.kernel}")
        demand(fused[self.kernel] >= depth, f"it ran {fused[self.kernel]} times in {depth} layers")
        return facts
