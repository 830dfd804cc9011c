"""Predictions of a plan's rows against the card."""

from __future__ import annotations

import dataclasses
import difflib
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from harness import RUN
from harness.commands.progress import Predictions, during
from harness.planner import edits, overhead, pool, records, verdict
from harness.planner.explore import Search, search
from harness.planner.plan.candidates import Asked, half_of
from harness.planner.plan.request import words
from harness.planner.verdict import Fit
from harness.prediction import Prediction
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from harness.system.cards import Card
from strategies.base import BadInput


@dataclass(frozen=True)
class Asking:
    """The checked request, the number of predictions at a time, and the progress display.
    ``recorded``: only predictions that ship with the project count."""

    asked: Asked
    jobs: int
    progress: Predictions
    recorded: bool = False

    def fits(
        self,
        rows: Sequence[Resolved],
        why: str = "",
        named: Callable[[Resolved], str] = lambda row: str(row.recipe),
    ) -> list[Fit]:
        """Judge each row against the card, in order. One call predicts all of them; a row that the
        card cannot run is not predicted. Progress shows ``why``, and each row by ``named``."""
        if self.recorded:
            gpu = self.asked.gpu
            return [fit for row in rows if (fit := known(row, gpu, recorded=True))]
        gpu, folder, told = self.asked.gpu, pool.default_folder(), self.progress
        kind = overhead.preferred(gpu.capability)
        lacks = [verdict.lack_of(row, gpu) for row in rows]
        paths = [pool.path_of(row, folder, kind) for row in rows]
        # Rows of one path share a prediction.
        first = {path: row for path, row, lack in zip(paths, rows, lacks, strict=True) if not lack}
        some, found = list(first.values()), list[Prediction]()
        if some:
            kept = {place for place, row in enumerate(some) if pool.cached(row, folder, kind)}
            if not pool.traces():  # then progress has nothing to show
                kept = set(range(len(some)))
            with during(told, list(map(named, some)), why, kept):
                found = pool.predict_all(some, folder, kind=kind, jobs=self.jobs, done=told.done)
        made = dict(zip(first, found, strict=True))
        return [
            verdict.cannot(row, gpu, lack) if lack else verdict.judge(row, made[path], gpu)
            for row, lack, path in zip(rows, lacks, paths, strict=True)
        ]

    def search(
        self, rows: Sequence[Resolved], *, partial: bool = False, first: bool = False
    ) -> tuple[list[Fit], list[Search]]:
        """Search a lattice for its answers (``explore.search``, which has ``first``).
        ``partial``: Ctrl-C ends it with the best so far; else it ends the command."""
        gpu, alone = self.asked.gpu, self.recorded or not pool.traces()

        def shipped(row: Resolved) -> Fit | None:
            counts = self.recorded or pool.ships()
            return known(row, gpu, recorded=True) if counts else None

        with pool.kept_workers():
            fits, proofs = search(rows, gpu, self.fits, shipped, alone=alone, first=first)
        if any(proof.stopped for proof in proofs) and not partial:
            raise KeyboardInterrupt
        return fits, proofs

    def answer(self, *, others: bool = True) -> tuple[list[Fit], list[Search], list[Fit] | None]:
        """Return the fits of the plan's rows, the proofs of its searches, and changes that fit.
        Without ``others``, changes are not searched for."""
        rows = self.asked.resolved
        searched = self.asked.searched
        fits, proofs = self.search(rows, partial=others) if searched else ([], [])
        fits = fits or self.fits(rows)  # of a lattice, if its card can run none
        stopped = any(proof.stopped for proof in proofs)
        return fits, proofs, None if stopped or not others else self.instead(fits)

    def instead(self, fits: Sequence[Fit], near: Fit | None = None) -> list[Fit] | None:
        """Return what was tried where none of ``fits`` fits; None if one does.
        These are recipes of the lattice around ``near``, which train the same weights, then smaller
        micro batches. ``near``: None for the nearest of ``fits``, if one has a need."""
        near, asked, tried = near or verdict.nearest(fits), self.asked, list[Fit]()
        if near is None or any(fit.fits for fit in fits):
            return None
        if not asked.searched and not near.resolved.spec.sampling:
            known = {fit.resolved.spec for fit in fits}
            rows = edits.around(near.resolved, asked.processes, half_of(asked.gpu))
            rows = [row for row in rows if row.spec not in known]
            tried = self.search(rows, first=True)[0] if rows else []
        least = verdict.nearest([near, *tried])
        if least and not any(fit.fits for fit in tried):
            less = edits.smaller(least.resolved, asked.processes)
            tried += self.fits(less, "None fits; trying smaller micro batches: ")
        return tried


def known(row: Resolved, gpu: Card, *, recorded: bool = False) -> Fit | None:
    """Judge a row by a prediction of an earlier call or a recorded one; None if there is none.
    ``recorded``: by one that ships with the project alone."""
    if lack := verdict.lack_of(row, gpu):
        return verdict.cannot(row, gpu, lack)
    kind = overhead.preferred(gpu.capability)
    if recorded:
        found = records.find(row.spec.model, records.name(row, kind))
    else:
        found = pool.cached(row, pool.default_folder(), kind)
    return verdict.judge(row, found, gpu) if found else None


def demand(found: Iterable[Fit | None], rows: Sequence[Resolved], gpu: Card) -> None:
    """Check that something was predicted of ``rows``, as far as this installation can trace.

    Raises:
        BadInput: nothing was, and tracing lacks a package; names it, how to install it, and the
            nearest question with a recorded answer.
    """
    lacks = pool.untraceable(rows[0]) if rows else ""
    if not lacks or any(fit and (fit.lack or fit.need_bytes is not None) for fit in found):
        return
    row, near = rows[0], _nearest(rows[0], gpu)
    asks = ["plan", "--recipes", near.spec.recipe, *words(near, gpu)] if near else []
    more = f". The nearest recorded one: {shlex.join([RUN, *asks])}" if near else ""
    raise BadInput(f"no prediction of {row.spec.model} answers this: {lacks}{more}")


def _nearest(row: Resolved, gpu: Card) -> Resolved | None:
    """Return the row recorded for such a card that differs from ``row`` in the fewest fields."""
    names = [path.name.removesuffix(records.ENDING) for path in records.FOLDER.glob("*.xz")]
    model = difflib.get_close_matches(row.spec.model, names, n=1, cutoff=0)[0]
    known = [records.record_of(line) for line in records.lines(model).values()]
    specs = [Spec(**one.spec) for one in known if one.kind == overhead.preferred(gpu.capability)]
    wanted = dataclasses.asdict(row.spec)

    def apart(found: Spec) -> int:
        return sum(value != wanted[name] for name, value in dataclasses.asdict(found).items())

    specs = [one for one in specs if one.device == row.spec.device and not one.sampling]
    return resolve(min(specs, key=apart)) if specs else None
