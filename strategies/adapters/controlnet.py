"""controlnet: a trained side branch on a frozen model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.adapters.partial import Partial
from strategies.base import demand
from strategies.engine import RunContext, TrainingRun
from strategies.subject import Subject, weights_dtype


@dataclass(frozen=True, kw_only=True)
class ControlNet(Partial):
    """Trains copies of the first blocks, as a ControlNet.

    ``share`` is their share of the blocks. The copies enter the frozen model through layers that
    start at zero.

    The data has no control images: the tokens of the noisy latent enter the branch instead. Memory
    and speed are those of a ControlNet, but it learns something else.
    """

    name: ClassVar[str] = "controlnet"
    source: ClassVar[str] = (
        "Zhang et al. 2023 (arXiv:2302.05543); on a DiT: Chen et al. 2024 (arXiv:2401.05252)"
    )
    reads_weights: ClassVar[bool] = True
    ranges: ClassVar[dict[str, Any]] = {"share": (lambda v: 0 < v <= 1, "above 0, to 1")}

    share: float = 0.5

    def traits(self) -> frozenset[str]:
        return frozenset({"frozen_weights", "doubles_tokens", "other_products"})

    def refuses(self, launch: RunContext) -> str | None:
        return launch.subject.lacks("token_blocks") or launch.subject.lacks("halves")

    def _number(self, depth: int) -> int:
        return max(1, round(self.share * depth))

    def by_block(self, depth: int) -> Sequence[bool]:
        """Return whether each block has a trained copy."""
        number = self._number(depth)
        return [index < number for index in range(depth)]

    def edit_model(self, module: Any, subject: Subject) -> None:
        import torch

        from strategies.adapters.controlled import Controlled

        blocks: Any
        (blocks,) = subject.groups(module)
        number = self._number(len(blocks))
        like = torch.empty(subject.survey.width, dtype=weights_dtype(module))
        for i in range(number):
            blocks[i] = Controlled(blocks[i], like, first=i == 0, last=i == number - 1)
        super().edit_model(module, subject)

    def trained(self, module: Any, subject: Subject) -> set[str]:
        words = (".copy.", ".zero.", ".enter.")
        return {n for n, _ in module.named_parameters() if any(word in n for word in words)}

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        facts, wanted = super().evidence(run), self._number(len(run.blocks()))
        changed = run.attached[self.name].changed()
        copies = sum(name.endswith(".zero.weight") for name in changed)
        demand(copies == wanted, f"{copies} copied blocks act on the model, expected {wanted}")
        return {"copies": copies, **facts}
