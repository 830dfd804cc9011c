"""Training a small part of the model's own weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Launch, Parity, Slot, Strategy, Trained, demand
from strategies.support.frozen import Frozen, split_facts, train_only

__all__ = ["DiffFit", "Head"]


@dataclass(frozen=True, kw_only=True)
class Head(Strategy):
    """Trains the final layer alone; backward ends there, so blocks keep no activations."""

    name: ClassVar[str] = "head"
    slot: ClassVar[Slot] = Slot.ADAPT
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    source: ClassVar[str] = "Yosinski et al. 2014, How transferable are features (arXiv:1411.1792)"

    def traits(self) -> frozenset[str]:
        return frozenset({"frozen_weights", "frozen_matrices", "frozen_blocks", "other_products"})

    def refuses(self, launch: Launch) -> str | None:
        if launch.traits & {"recomputes", "moves_activations"}:
            return (
                "backward ends before the blocks, and nothing of them is kept; leave checkpoint out"
            )
        return None

    def edit_model(self, module: Any) -> None:
        names = {n for n, _ in module.named_parameters() if n.startswith("final_layer.")}
        train_only(module, names)

    def attach(self, trained: Trained) -> Frozen:
        return Frozen(trained)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        facts = split_facts(trained, self.name)
        named = trained.module.named_parameters()
        inner = [n for n, p in named if p.requires_grad and not n.startswith("final_layer.")]
        demand(not inner, f"{len(inner)} weights before the final layer take a gradient")
        return facts


def scaled(layer: Any, given: Any, output: Any) -> Any:
    """A forward hook: the output times the layer's own scale."""
    return output * layer.gamma


@dataclass(frozen=True, kw_only=True)
class DiffFit(Strategy):
    """Trains biases, the label table and two new scales a block, which start at one."""

    name: ClassVar[str] = "difffit"
    slot: ClassVar[Slot] = Slot.ADAPT
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    source: ClassVar[str] = "Xie et al. 2023, DiffFit (arXiv:2304.06648)"

    def traits(self) -> frozenset[str]:
        return frozenset({"frozen_weights", "frozen_matrices", "other_products"})

    def refuses(self, launch: Launch) -> str | None:
        if "pure_bf16" in launch.traits:
            return "a scale of one moves by steps that bfloat16 cannot hold; use bf16"
        return None

    def edit_model(self, module: Any) -> None:
        import torch

        ones = torch.ones_like(module.pos_embed.data[0, 0])  # as wide as the model, in its dtype
        for layer in (part for block in module.blocks for part in (block.attn, block.mlp)):
            layer.gamma = torch.nn.Parameter(ones.clone())
            layer.register_forward_hook(scaled)
        train_only(module, {n for n, _ in module.named_parameters() if self._trained(n)})

    @staticmethod
    def _trained(name: str) -> bool:
        return name.endswith((".bias", ".gamma")) or name.startswith("y_embedder.")

    def attach(self, trained: Trained) -> Frozen:
        return Frozen(trained)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        facts = split_facts(trained, self.name)
        free = {n for n, p in trained.module.named_parameters() if p.requires_grad}
        strange = sorted(n for n in free if not self._trained(n))
        demand(not strange, f"{len(strange)} weights beside biases and scales take a gradient")
        scales = {n for n in free if n.endswith(".gamma")}
        wanted = 2 * len(trained.module.blocks)
        moved = len(scales & trained.attached[self.name].changed())
        demand(moved == wanted, f"{moved} scales have moved, of {wanted} asked for")
        return {**facts, "scales": moved}
