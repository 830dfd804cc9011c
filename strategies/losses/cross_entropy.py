"""cross_entropy: the loss over a vocabulary, with all logits or a part of them in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence.rules import seen_by_one
from strategies.strategy import Strategy
from strategies.subject import Subject


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Strategy):
    """Computes a loss over a vocabulary in one of four ways.

    ``kind=full`` has all logits. ``kind=chunked`` has the logits of one of ``chunks`` parts of the
    tokens at a time, and computes them again in backward. ``kind=fused`` is torch's fused linear
    cross entropy. ``kind=cut`` is the cut-cross-entropy package's, with kernels for GPUs.
    """

    name: ClassVar[str] = "cross_entropy"
    slot: ClassVar[Slot] = Slot.LOSS
    source: ClassVar[str] = (
        "Wijmans et al. 2024, Cut Your Losses (arXiv:2411.09009); "
        "torch.nn.functional.linear_cross_entropy"
    )
    values: ClassVar[dict[str, Any]] = {"kind": ("full", "chunked", "fused", "cut")}
    least: ClassVar[dict[str, int]] = {"chunks": 2}

    kind: str = "chunked"
    chunks: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind != "chunked" and self.chunks != 8:
            raise ValueError(f"chunks are of kind=chunked; leave chunks={self.chunks} out")

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        more = {"fused": ("linear_cross_entropy",), "cut": ("cut_cross_entropy",)}
        return self.needs + more.get(self.kind, ())

    def refuses(self, launch: RunContext) -> str | None:
        return super().refuses(launch) or launch.subject.lacks("vocabulary")

    def edit_model(self, module: Any, subject: Subject) -> None:
        subject.part(module, "vocabulary").cross_entropy = self._function()

    def _function(self) -> Any:
        from strategies.losses import functions

        if self.kind == "chunked":
            return functions.chunked(self.chunks)
        return getattr(functions, self.kind)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        return seen_by_one(run, self._shown)

    def _shown(self, run: TrainingRun) -> dict[str, Any]:
        """Return the vocabulary, and the most logits that were in memory at once."""
        layer, seen = run.subject.part(run.module, "vocabulary"), run.observed
        if layer is None:  # another stage of a pipeline has it
            return {}
        ours = layer.cross_entropy is self._function()
        demand(ours, f"another function than kind={self.kind} computes the loss")
        facts = {"vocabulary": layer.out_features}
        if not seen.ran:  # a training run, or compiled blocks
            return facts
        # Only a loss runs this operator; products as wide as the vocabulary may be of any layer.
        softmax = [r.shapes[0] for r in seen.ran if r.name == "aten::_log_softmax"]
        rows = max((shape[0] for shape in softmax if shape[-1] == layer.out_features), default=0)
        plain = self.kind in ("full", "chunked")
        demand(bool(rows) == plain, f"logits of {rows} tokens were in memory at once")
        return {**facts, "logit_rows_at_once": rows} if plain else facts
