"""head and difffit: training of a small part of the model's own weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence.states import Frozen, split_facts, train_only
from strategies.strategy import Strategy
from strategies.subject import Subject, weights_dtype


class Partial(Strategy):
    """Base of strategies that train some parameters of the model, by name, and freeze the rest."""

    slot: ClassVar[Slot] = Slot.ADAPT
    alters: ClassVar[tuple[str, ...]] = ("gradients", "update")

    def trained(self, module: Any, subject: Subject) -> set[str]:
        """Return the names of the parameters that are trained."""
        raise NotImplementedError

    def edit_model(self, module: Any, subject: Subject) -> None:
        train_only(module, self.trained(module, subject))

    def attach(self, run: TrainingRun) -> Frozen:
        return Frozen(run)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        facts = split_facts(run, self.name)
        free = {n for n, p in run.module.named_parameters() if p.requires_grad}
        odd = sorted(free - self.trained(run.module, run.subject))
        demand(not odd, f"{len(odd)} other weights take a gradient: {', '.join(odd[:1])}")
        return facts


@dataclass(frozen=True, kw_only=True)
class Head(Partial):
    """Trains the final layer alone. Backward ends there, so blocks keep no activations."""

    name: ClassVar[str] = "head"
    source: ClassVar[str] = "Yosinski et al. 2014, How transferable are features (arXiv:1411.1792)"

    def traits(self) -> frozenset[str]:
        return frozenset({"frozen_weights", "frozen_matrices", "frozen_blocks", "other_products"})

    def refuses(self, launch: RunContext) -> str | None:
        return super().refuses(launch) or launch.subject.lacks("head")

    def trained(self, module: Any, subject: Subject) -> set[str]:
        return names_in(module, subject.part(module, "head"))


def names_in(module: Any, part: Any) -> set[str]:
    """Return the names, in ``module``, of the parameters of one of its parts."""
    own = {id(p) for p in part.parameters()}
    return {name for name, p in module.named_parameters() if id(p) in own}


@dataclass(frozen=True, kw_only=True)
class DiffFit(Partial):
    """Trains biases, the label table and scales of blocks.

    Each block gets two new scales, which start at one.
    """

    name: ClassVar[str] = "difffit"
    source: ClassVar[str] = "Xie et al. 2023, DiffFit (arXiv:2304.06648)"

    def traits(self) -> frozenset[str]:
        return frozenset({"frozen_weights", "frozen_matrices", "other_products"})

    def refuses(self, launch: RunContext) -> str | None:
        lack = launch.subject.lacks("halves") or launch.subject.lacks("label_table")
        return super().refuses(launch) or lack

    def trained(self, module: Any, subject: Subject) -> set[str]:
        names = {n for n, _ in module.named_parameters() if n.endswith((".bias", ".gamma"))}
        return names | names_in(module, subject.part(module, "label_table"))

    def edit_model(self, module: Any, subject: Subject) -> None:
        import torch

        width, dtype = subject.survey.width, weights_dtype(module)
        for block in subject.blocks(module):
            for layer in (block.attn, block.mlp):
                layer.gamma = torch.nn.Parameter(torch.ones(width, dtype=dtype))
                layer.register_forward_hook(lambda layer, given, out: out * layer.gamma)
        super().edit_model(module, subject)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        facts, wanted = super().evidence(run), 2 * len(run.blocks())
        moved = sum(n.endswith(".gamma") for n in run.attached[self.name].changed())
        demand(moved == wanted, f"{moved} scales have changed, expected {wanted}")
        return {**facts, "scales": moved}
