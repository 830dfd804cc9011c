"""Sparse gradients of the label table: only the rows of the labels that a batch has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Launch, Slot, Strategy, Trained, Watcher, demand
from strategies.support import states

__all__ = ["Rows", "SparseEmbedding"]


class Rows(Watcher):
    """Bytes of the label table's gradient as this rank's backward left it, and of a dense one."""

    def __init__(self, trained: Trained) -> None:
        self.bytes = self.dense_bytes = self.rows = self.seen = 0
        table = trained.module.y_embedder.embedding_table.weight
        table.register_post_accumulate_grad_hook(self._count)

    def _count(self, table: Any) -> None:
        gradient = table.grad
        self.dense_bytes, self.seen = table.numel() * table.element_size(), self.seen + 1
        if gradient.is_sparse:
            self.rows = len(gradient._values())
        self.bytes = sum(t.numel() * t.element_size() for t in states.stored(gradient))


@dataclass(frozen=True, kw_only=True)
class SparseEmbedding(Strategy):
    """Keeps and sends the label table's gradient as the rows that a batch touched."""

    name: ClassVar[str] = "sparse_embedding"
    slot: ClassVar[Slot] = Slot.COMPRESS
    source: ClassVar[str] = "torch.nn.Embedding(sparse=True); Horovod's sparse gradients"

    def traits(self) -> frozenset[str]:
        return frozenset({"sparse_gradients"})

    def refuses(self, launch: Launch) -> str | None:
        if launch.engine == "DEEPSPEED":
            return "ZeRO flattens gradients, and a flat one is dense; use ddp or single"
        if launch.engine == "MULTI_GPU":
            return "NCCL reduces no sparse tensors; use single, or leave this out"
        if "takes_sparse" not in launch.traits:
            return (
                "the optimizer takes no sparse gradients (Adam's moments decay in every row); "
                "add sgd:momentum=0.0"
            )
        if launch.clips:
            return "clipping reads gradients as dense; set --grad-clip 0"
        if "frozen_weights" in launch.traits:
            return "the label table may be frozen here; leave this out"
        return None

    def edit_model(self, module: Any) -> None:
        module.y_embedder.embedding_table.sparse = True

    def attach(self, trained: Trained) -> Rows:
        return Rows(trained)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        rows = trained.attached.get(self.name)
        demand(isinstance(rows, Rows) and rows.seen > 0, "no gradient of the label table was seen")
        demand(rows.rows > 0, "the label table's gradient is dense")
        launch = trained.launch
        sent = launch.engine != "NO" and launch.processes > 1 and not launch.simulated
        return {
            "rows": rows.rows,
            "wire_bytes" if sent else "gradient_bytes": rows.bytes,
            "dense_bytes": rows.dense_bytes,
            "ratio": round(rows.bytes / rows.dense_bytes, 4),
        }
