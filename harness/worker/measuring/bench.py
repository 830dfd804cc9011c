"""One rank's run, and what measures and records it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.memory import dissect
from harness.resolve import Resolved
from harness.worker.loop import Log, Run, optimizer_step
from harness.worker.measuring.gpu_watch import GpuWatch
from harness.worker.measuring.meter import Meter
from harness.worker.status import Reporter

__all__ = ["Bench"]


@dataclass(kw_only=True)
class Bench:
    """One rank's run, and what measures and records it."""

    resolved: Resolved
    folder: Path
    reporter: Reporter
    meter: Meter
    run: Run
    log: Log
    watch: GpuWatch = field(default_factory=lambda: GpuWatch(0))

    @property
    def accelerator(self) -> Any:
        """accelerate's, which the run was prepared with."""
        return self.run.trained.accelerator

    @property
    def baseline(self) -> tuple[Any, ...]:
        """Tensors that the meter's baseline holds already. On a CPU the data, which is opened
        before the baseline is taken; on a GPU none, for its allocator counts the data."""
        on_gpu = self.accelerator.device.type == "cuda"
        return () if on_gpu else tuple(vars(self.run.feed.dataset).values())

    def step(self) -> None:
        """One optimizer step more, which no phase counts."""
        optimizer_step(self.run, self.run.trained.optimizer_steps, self.log)

    def infer(self) -> None:
        """One micro batch through the model."""
        batch = next(iter(self.run.feed.micro_batches(self.run.trained.optimizer_steps)))
        trained = self.run.trained
        trained.subject.predict(trained.model, trained.cut(batch.x), batch.t, batch.conditions)

    def look(self) -> dissect.Look:
        """What a portrait needs of this rank."""
        return dissect.Look(self.step, self.infer, self.meter.synchronize, self.baseline)
