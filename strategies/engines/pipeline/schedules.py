"""The orders in which stages run the micro batches of a step. No torch above."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["SCHEDULES", "UNTRIED", "Schedule"]


@dataclass(frozen=True)
class Schedule:
    """``kind`` is torch's class of it (``torch.distributed.pipelining``), ``source`` its paper."""

    kind: str
    source: str

    def make(self, stage: Any, micro: int, loss: Any) -> Any:
        """torch's schedule of ``micro`` micro batches for this rank's stage. ``loss(output,
        target)`` is a micro batch's mean, so that gradients are divided by ``micro``."""
        from torch.distributed import pipelining

        return getattr(pipelining, self.kind)(stage, micro, loss_fn=loss, scale_grads=True)

    def fault(self, stages: int, micro: int) -> str | None:
        """Why so many micro batches cannot run on so many stages, with the way out."""
        if self.kind == "Schedule1F1B" and micro < stages:
            return f"1f1b fills {stages} stages with as many micro batches; take micro={stages}"
        return None

    def in_flight(self, stage: int, stages: int, micro: int) -> int:
        """Micro batches of which this stage keeps activations at most."""
        return micro if self.kind == "ScheduleGPipe" else min(micro, stages - stage)


SCHEDULES = {
    "gpipe": Schedule("ScheduleGPipe", "Huang et al. 2019 (arXiv:1811.06965)"),
    "1f1b": Schedule("Schedule1F1B", "Narayanan et al. 2019 (PipeDream, SOSP)"),
}
UNTRIED = {
    "interleaved": "several runs of blocks a rank are not cut yet",
    "zero_bubble": "several runs of blocks a rank are not cut yet",
}
"""Schedule that torch has too -> why it is refused."""


def idle_share(stages: int, micro: int) -> float:
    """The share of a step that a stage waits, where all stages take equally long and sending
    nothing: (N - 1) / (M + N - 1), of gpipe and 1f1b alike."""
    return (stages - 1) / (micro + stages - 1)
