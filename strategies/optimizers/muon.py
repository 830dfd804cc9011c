"""muon: orthogonalized momentum; one moment per matrix instead of two."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Settings, Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence import rules, states
from strategies.evidence.rules import label, orthogonal
from strategies.strategy import Strategy
from strategies.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Muon(Strategy):
    """Muon for the blocks' matrices, AdamW for all else.

    All else is embeddings, biases and the output.

    The step is scaled to the size of AdamW's (Moonlight), so that the spec's learning rate holds.
    """

    name: ClassVar[str] = "muon"
    slot: ClassVar[Slot] = Slot.OPTIMIZE
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("update",)
    source: ClassVar[str] = (
        "Jordan et al. 2024, Muon; Liu et al. 2025, Moonlight (arXiv:2502.16982)"
    )

    momentum: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum!r}; from 0 to below 1")

    def traits(self) -> frozenset[str]:
        return frozenset({"own_state"})

    def refuses(self, launch: RunContext) -> str | None:
        if "flat_weights" in launch.traits:
            return (
                "torch's Muon needs matrices, and DeepSpeed's own takes norms and clips after it "
                "orthogonalized the gradients (0.19); use fsdp2, ddp or single"
            )
        if "frozen_matrices" in launch.traits:
            return "no matrix of the blocks is trained here; leave muon out"
        return None

    def edit_model(self, module: Any, subject: Subject) -> None:
        for block in subject.blocks(module):
            for p in block.parameters():
                p.hidden_matrix = p.ndim == 2

    def make_optimizer(self, params: list[Any], settings: Settings, launch: RunContext) -> Any:
        import torch

        from strategies.optimizers.two_optimizers import TwoOptimizers

        matrices = [p for p in params if getattr(p, "hidden_matrix", False)]
        others = [p for p in params if not getattr(p, "hidden_matrix", False)]
        muon = torch.optim.Muon(
            matrices,
            lr=settings.learning_rate,
            momentum=self.momentum,
            weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        parts = {"muon": states.count_steps(muon)}
        if others:
            parts["adamw"] = torch.optim.AdamW(others, fused=True, **settings.adam)
        return TwoOptimizers(parts)

    def observe(self, trained: TrainingRun) -> AbstractContextManager[Any]:
        """Watch the update of one whole matrix of the last block."""
        inner = [p for p in trained.blocks()[-1].parameters() if p.requires_grad and p.ndim == 2]
        target = min(inner, key=lambda p: p.numel(), default=None)
        return rules.watch(trained.inner_optimizer, lambda p: p is target, whole=True)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        optimizer = trained.inner_optimizer
        kinds = {name: type(p).__name__ for name, p in getattr(optimizer, "parts", {}).items()}
        demand(
            kinds.get("muon") == "Muon",
            f"the optimizer is {type(optimizer).__name__} with {kinds}, expected Muon",
        )
        settings = trained.settings
        states.agree(trained, lr=settings.learning_rate, weight_decay=settings.weight_decay)
        inner = [p for block in trained.blocks() for p in block.parameters()]
        wanted = [p for p in inner if p.requires_grad and p.ndim == 2]
        kept = [set(optimizer.state[p]) for p in wanted]
        demand(
            all(k == {"momentum_buffer", "step"} for k in kept),
            "Muon does not step every matrix of the blocks",
        )
        counted = {float(s["step"]) for s in optimizer.state.values()}
        demand(
            len(counted) == 1,
            f"the two optimizers stepped different numbers of times: {sorted(counted)}",
        )
        facts = {
            "classes": kinds,
            "steps": states.steps(trained),
            "muon_matrices": len(wanted),
            "state_bytes_per_element": round(states.per_element(trained), 3),
        }
        seen = self.note(trained)
        # A bfloat16 weight rounds most of an update away: the rest shows no singular values.
        if not seen or seen[0].before["weight"].element_size() < 4:
            return label(facts, "classes")
        return facts | orthogonal(seen[0], settings, self.momentum)
