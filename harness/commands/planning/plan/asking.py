"""What every question of a plan asks with: predictions of rows against the card, with progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.commands.planning.plan.asked import Asked
from harness.commands.planning.plan.progress import PlanProgress
from harness.predict import attention, pool, verdict, ways_out
from harness.predict.inverses import SOUGHT
from harness.predict.prediction import Prediction
from harness.predict.search import Largest
from harness.predict.verdict import Fit
from harness.predict.ways_out import Ways
from harness.resolve import Resolved

__all__ = ["Asking"]


@dataclass(frozen=True)
class Asking:
    """What was asked for, how many predictions run at a time, and who is told of each."""

    asked: Asked
    jobs: int
    progress: PlanProgress

    def fits(self, rows: Sequence[Resolved], why: str = "") -> list[Fit]:
        """Each row against the card; ``why`` says what for. What the card cannot run is not
        predicted."""
        gpu, lacks = self.asked.gpu, [verdict.lack_of(row, self.asked.gpu) for row in rows]
        able = [row for row, lack in zip(rows, lacks, strict=True) if not lack]
        predictions = iter(self._predicted(able, why) if able else [])
        return [
            verdict.cannot(row, gpu, lack) if lack else verdict.judge(row, next(predictions), gpu)
            for row, lack in zip(rows, lacks, strict=True)
        ]

    def ways(self, fits: Sequence[Fit]) -> Ways | None:
        """What else would fit, where none of ``fits`` does."""
        return ways_out.seek(fits, self.asked.processes, self.fits)

    def largest(self, what: str, rows: Sequence[Resolved], tries: int = 0) -> list[Largest]:
        """The largest ``what`` (a key of ``SOUGHT``) of each row."""
        folder, gpu = pool.default_folder(), self.asked.gpu
        return SOUGHT[what].seek(rows, gpu, folder, self.jobs, self.progress, tries)

    def _predicted(self, rows: Sequence[Resolved], why: str) -> list[Prediction]:
        kind, folder = attention.preferred(self.asked.gpu.capability), pool.default_folder()
        kept = {i for i, row in enumerate(rows) if pool.path_of(row, folder, kind).exists()}
        self.progress.begin([self._name(row) for row in rows], self.jobs, why, kept)
        told = {"kind": kind, "jobs": self.jobs, "done": self.progress.done}
        predictions = pool.predict_all(rows, folder, **told)
        self.progress.end()
        return predictions

    def _name(self, row: Resolved) -> str:
        """A recipe, with the GPUs where they are not those of the plan."""
        number = row.spec.processes
        usual = number in (1, self.asked.processes)
        return str(row.recipe) if usual else f"{row.recipe} on {number} GPUs"
