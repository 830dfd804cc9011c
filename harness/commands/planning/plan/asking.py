"""What every question of a plan asks with: predictions of rows against the card, with progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.commands.planning.plan.asked import Asked
from harness.commands.planning.plan.progress import PlanProgress
from harness.predict import attention, pool, verdict, ways_out
from harness.predict.inverses import SOUGHT
from harness.predict.prediction import Prediction
from harness.predict.search import Largest
from harness.predict.speed.cards import Card
from harness.predict.verdict import Fit
from harness.predict.ways_out import Ways
from harness.resolve import Resolved

__all__ = ["Asking", "judged"]


@dataclass(frozen=True)
class Asking:
    """What was asked for, how many predictions run at a time, and who is told of each."""

    asked: Asked
    jobs: int
    progress: PlanProgress

    def fits(self, rows: Sequence[Resolved], why: str = "") -> list[Fit]:
        """Each row against the card; ``why`` says what for."""
        gpu = self.asked.gpu
        return judged([(r, gpu) for r in rows], self._name, why, jobs=self.jobs, told=self.progress)

    def ways(self, fits: Sequence[Fit]) -> Ways | None:
        """What else would fit, where none of ``fits`` does."""
        return ways_out.seek(fits, self.asked.processes, self.fits)

    def largest(
        self, what: str, rows: Sequence[Resolved], tries: int = 0, told: Sequence[Fit] = ()
    ) -> list[Largest]:
        """The largest ``what`` (a key of ``SOUGHT``) of each row, beginning with the fits that are
        ``told``."""
        folder, gpu = pool.default_folder(), self.asked.gpu
        return SOUGHT[what].seek(rows, gpu, folder, self.jobs, self.progress, tries, told=told)

    def _name(self, row: Resolved, gpu: Card) -> str:
        """A recipe, with the GPUs where they are not those of the plan."""
        number = row.spec.processes
        usual = number in (1, self.asked.processes)
        return str(row.recipe) if usual else f"{row.recipe} on {number} GPUs"


def judged(
    pairs: Sequence[tuple[Resolved, Card]],
    named: Callable[[Resolved, Card], str],
    why: str = "",
    *,
    jobs: int,
    told: PlanProgress,
) -> list[Fit]:
    """Each row against its card, in order: all are predicted by one call, and what cards of a kind
    share once. What a card cannot run is not predicted. ``told`` hears of each, as it is
    ``named``."""
    folder, lacks = pool.default_folder(), [verdict.lack_of(*pair) for pair in pairs]
    kinds = [attention.preferred(gpu.capability) for _, gpu in pairs]
    paths = [pool.path_of(row, folder, kind) for (row, _), kind in zip(pairs, kinds, strict=True)]
    # Of each path the first pair.
    wanted = {paths[i]: i for i in reversed(range(len(pairs))) if not lacks[i]}
    order = sorted(wanted.values())
    known: dict[Path, Prediction] = {}
    if order:
        kept = {place for place, i in enumerate(order) if paths[i].exists()}
        told.begin([named(*pairs[i]) for i in order], jobs, why, kept)
        asked = {"kind": [kinds[i] for i in order], "jobs": jobs, "done": told.done}
        found = pool.predict_all([pairs[i][0] for i in order], folder, **asked)
        known = dict(zip((paths[i] for i in order), found, strict=True))
        told.end()
    return [
        verdict.cannot(row, gpu, lack) if lack else verdict.judge(row, known[path], gpu)
        for (row, gpu), lack, path in zip(pairs, lacks, paths, strict=True)
    ]
