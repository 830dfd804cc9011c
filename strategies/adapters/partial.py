"""head and difffit: training of a small part of the model's own weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence.states import Frozen, split_facts, train_only
from strategies.strategy import Strategy
from strategies.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Head(Strategy):
    """Trains the final layer alone. Backward ends there, so blocks keep no activations."""

    name: ClassVar[str] = "head"
    slot: ClassVar[Slot] = Slot.ADAPT
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("gradients", "update")
    source: ClassVar[str] = "Yosinski et al. 2014, How transferable are features (arXiv:1411.1792)"

    def traits(self) -> frozenset[str]:
        return frozenset({"frozen_weights", "frozen_matrices", "frozen_blocks", "other_products"})

    def refuses(self, launch: RunContext) -> str | None:
        return super().refuses(launch) or launch.subject.lacks("head")

    def edit_model(self, module: Any, subject: Subject) -> None:
        train_only(module, names_in(module, subject.head(module)))

    def attach(self, trained: TrainingRun) -> Frozen:
        return Frozen(trained)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        facts = split_facts(trained, self.name)
        free = {n for n, p in trained.module.named_parameters() if p.requires_grad}
        inner = free - names_in(trained.module, trained.subject.head(trained.module))
        demand(not inner, f"{len(inner)} weights before the final layer take a gradient")
        return facts


def names_in(module: Any, part: Any) -> set[str]:
    """Return the names, in ``module``, of the parameters of one of its parts."""
    own = {id(p) for p in part.parameters()}
    return {name for name, p in module.named_parameters() if id(p) in own}


def scaled(layer: Any, given: Any, output: Any) -> Any:
    """Multiply the output by the layer's own scale (a forward hook)."""
    return output * layer.gamma


@dataclass(frozen=True, kw_only=True)
class DiffFit(Strategy):
    """Trains biases, the label table and scales of blocks.

    Each block gets two new scales, which start at one.
    """

    name: ClassVar[str] = "difffit"
    slot: ClassVar[Slot] = Slot.ADAPT
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("gradients", "update")
    source: ClassVar[str] = "Xie et al. 2023, DiffFit (arXiv:2304.06648)"

    def traits(self) -> frozenset[str]:
        return frozenset({"frozen_weights", "frozen_matrices", "other_products"})

    def refuses(self, launch: RunContext) -> str | None:
        lack = launch.subject.lacks("halves") or launch.subject.lacks("label_table")
        return super().refuses(launch) or lack

    def edit_model(self, module: Any, subject: Subject) -> None:
        import torch

        width, dtype = subject.dimensions.width, subject.dtype(module)
        for block in subject.blocks(module):
            for layer in (block.attn, block.mlp):
                layer.gamma = torch.nn.Parameter(torch.ones(width, dtype=dtype))
                layer.register_forward_hook(scaled)
        train_only(module, self._trained(module, subject))

    @staticmethod
    def _trained(module: Any, subject: Subject) -> set[str]:
        names = {n for n, _ in module.named_parameters() if n.endswith((".bias", ".gamma"))}
        return names | names_in(module, subject.label_table(module))

    def attach(self, trained: TrainingRun) -> Frozen:
        return Frozen(trained)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        facts = split_facts(trained, self.name)
        free = {n for n, p in trained.module.named_parameters() if p.requires_grad}
        strange = free - self._trained(trained.module, trained.subject)
        demand(not strange, f"{len(strange)} weights other than biases and scales take a gradient")
        scales = {n for n in free if n.endswith(".gamma")}
        wanted = 2 * len(trained.blocks())
        moved = len(scales & trained.attached[self.name].changed())
        demand(moved == wanted, f"{moved} scales have changed, expected {wanted}")
        return {**facts, "scales": moved}
