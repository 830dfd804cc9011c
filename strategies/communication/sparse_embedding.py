"""sparse_embedding: gradients of the label table with only the rows of a batch's labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Attachment, Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence.readings import stored
from strategies.evidence.rules import label
from strategies.strategy import Strategy
from strategies.subject import Subject


class TouchedRows(Attachment):
    """Counter of the bytes of the label table's gradient after backward, and of a dense one."""

    def __init__(self, trained: TrainingRun) -> None:
        self.bytes = self.dense_bytes = self.rows = self.seen = 0
        table = trained.subject.label_table(trained.module).weight
        table.register_post_accumulate_grad_hook(self._count)

    def _count(self, table: Any) -> None:
        gradient = table.grad
        self.dense_bytes, self.seen = table.numel() * table.element_size(), self.seen + 1
        if gradient.is_sparse:
            self.rows = len(gradient._values())
        self.bytes = sum(t.numel() * t.element_size() for t in stored(gradient))


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
        subject.label_table(module).sparse = True

    def attach(self, trained: TrainingRun) -> TouchedRows:
        return TouchedRows(trained)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        rows: Any = trained.attached.get(self.name)
        there = isinstance(rows, TouchedRows) and rows.seen > 0
        demand(there, "the label table had no gradient")
        demand(rows.rows > 0, "the label table's gradient is dense")
        launch, seen = trained.launch, trained.observed
        alone = "one_process" in launch.traits or launch.processes == 1 or launch.simulated
        name = "gradient_bytes" if alone else "wire_bytes"
        facts = {"rows": rows.rows, name: rows.bytes, "dense_bytes": rows.dense_bytes}
        if alone:
            return facts
        if seen is None or not seen.sent:
            return label(facts, "wire_bytes")  # the gradient's bytes: no transfer was observed
        sent = (s for s in seen.sent if s.phase == "backward" and s.dtype == "int64")
        places = sum(s.bytes for s in sent)
        demand(places > 0, "the label table's gradient was sent as a dense tensor")
        return {**facts, "place_bytes_sent": places}
