"""Largest size at which any recipe of a lattice fits, for adapters and for all weights.

Two recipes are followed: the fastest at the requested size, and those that need the least. Beyond
the largest size found, a search rules out every recipe. No torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.planner import pool
from harness.planner.advice import SOUGHT
from harness.planner.explore import Lean, Proof, run
from harness.planner.plan.answer import counts_in_words
from harness.planner.plan.lattice import adapts
from harness.planner.search import Ladder, Largest
from harness.planner.verdict import Fit
from harness.resolve import Resolved
from strategies.base import BadInput

if TYPE_CHECKING:
    from harness.planner.plan.tracing import Asking

ROUNDS = 4
"""Most recipes that are followed beyond the first."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Answer of one training: the sizes of the recipes that were followed, the largest last.

    ``beyond`` is the search at the next size, if it found no recipe that fits; ``size`` names that
    size.
    """

    adapters: bool
    followed: Sequence[Largest]
    size: str = ""
    beyond: Proof | None = None

    @property
    def as_json(self) -> dict[str, Any]:
        """The answer as plain data."""
        found = {"training": "adapters" if self.adapters else "all weights"}
        found |= {"recipes": [one.recipe for one in self.followed], "none_at": self.size}
        return found | {"beyond": self.beyond.as_json if self.beyond else None}

    @property
    def line(self) -> str:
        """The answer in words."""
        kind = "Adapters" if self.adapters else "All weights"
        last = self.followed[-1] if self.followed else None
        told = f"{last.recipe} reaches the largest" if last and last.fits else "none fits"
        if not self.beyond:
            ended = last is None or last.over is None
            return f"{kind}: {told}" + ("" if ended else "; beyond it nothing was searched")
        proof = self.beyond
        at = f"at {self.size} none of {proof.recipes} recipes is sure to fit"
        return f"{kind}: {told}; {at}: {counts_in_words(proof)}"


def reaches(what: str, rows: Sequence[Resolved], asking: Asking) -> list[Reach]:
    """Return the largest ``what`` (a key of ``SOUGHT``) of each training that ``rows`` have.

    Raises:
        BadInput: the model has only one size.
    """
    SOUGHT[what].ladder(rows)
    with pool.kept_workers():
        fits, proofs = asking.search(rows)
        return [_reach(what, rows, proof, fits, asking) for proof in proofs]


def _reach(
    what: str, rows: Sequence[Resolved], proof: Proof, fits: Sequence[Fit], asking: Asking
) -> Reach:
    some = [row for row in rows if adapts(row) is proof.adapters]
    ladder = SOUGHT[what].ladder(some)
    first = proof.best if proof.best and proof.best.fits else None
    followed = asking.largest(what, [first.resolved], told=fits) if first else []
    index = ladder.start
    for _ in range(ROUNDS):
        if followed and followed[-1].over is None:
            break
        if followed:
            index = ladder.place(followed[-1].over.resolved)
        at = _at(ladder, some, index)
        lean = _leanest(at, [one.over for one in followed], asking)
        found = next((fit for fit in lean.fits if fit.fits), None)
        if found:
            base = next(row for row, sized in at if str(sized.recipe) == found.label)
            followed += asking.largest(what, [base], told=[found])
        elif followed or index == 0:
            size = ladder.named(at[0][1])
            return Reach(adapters=proof.adapters, followed=followed, size=size, beyond=lean.proof)
        else:
            index = 0
    return Reach(adapters=proof.adapters, followed=followed)


def _at(ladder: Ladder, rows: Sequence[Resolved], index: int) -> list[tuple[Resolved, Resolved]]:
    """Return each row with the same row at a size, without those that are invalid there."""
    found = []
    for row in rows:
        with contextlib.suppress(BadInput):
            found.append((row, ladder.at(row, index)))
    return [(row, sized) for row, sized in found if not sized.refusal]


def _leanest(at: Sequence[tuple[Resolved, Resolved]], known: Sequence[Fit], asking: Asking) -> Lean:
    """Return a finished search for any row of a size that fits. ``known``: fits of some rows."""
    rows = [sized for _, sized in at]
    specs = {row.spec for row in rows}
    one = Lean(rows=rows, gpu=asking.asked.gpu)
    one.take([fit for fit in known if fit.resolved.spec in specs])
    run([one], lambda pairs: asking.fits([row for _, row in pairs], "Beyond the largest so far: "))
    return one
