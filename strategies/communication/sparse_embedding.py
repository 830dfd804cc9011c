"""sparse_embedding: gradients of the label table with only the rows of a batch's labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Attachment, Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence.readings import stored
from strategies.strategy import Strategy
from strategies.subject import Subject


class TouchedRows(Attachment):
    """Counter of the rows and bytes of the label table's gradient after backward."""

    def __init__(self, run: TrainingRun) -> None:
        self.rows = self.bytes = 0
        self.table = run.subject.part(run.module, "label_table").weight
        self.table.register_post_accumulate_grad_hook(self._count)

    def _count(self, table: Any) -> None:
        self.rows = len(table.grad._values()) if table.grad.is_sparse else 0
        self.bytes = sum(t.nbytes for t in stored(table.grad))


@dataclass(frozen=True, kw_only=True)
class SparseEmbedding(Strategy):
    """Sends only touched rows of the label table's gradient.

    A row is touched if a label of the batch names it. The gradient is kept in that form.
    """

    name: ClassVar[str] = "sparse_embedding"
    slot: ClassVar[Slot] = Slot.COMPRESS
    source: ClassVar[str] = "torch.nn.Embedding(sparse=True); Horovod's sparse gradients"

    def traits(self) -> frozenset[str]:
        return frozenset({"sparse_gradients"})

    def refuses(self, launch: RunContext) -> str | None:
        return super().refuses(launch) or launch.subject.lacks("label_table")

    def edit_model(self, module: Any, subject: Subject) -> None:
        subject.part(module, "label_table").sparse = True

    def attach(self, run: TrainingRun) -> TouchedRows:
        return TouchedRows(run)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        rows: Any = run.attached.get(self.name)
        there = isinstance(rows, TouchedRows) and rows.rows > 0
        demand(there, "the label table has no gradient, or a dense one")
        size = {"gradient_bytes": rows.bytes, "dense_bytes": rows.table.nbytes}
        launch, seen = run.launch, run.observed
        if launch.processes == 1 or launch.simulated or not seen.sent:
            return {"rows": rows.rows, **size}
        sent = (s for s in seen.sent if s.phase == "backward" and s.dtype == "int64")
        places = sum(s.bytes for s in sent)
        demand(places > 0, "the label table's gradient was sent as a dense tensor")
        return {"rows": rows.rows, **size, "place_bytes_sent": places}
