"""Which rows alter the computation alike, and how each stands to the plainest of them."""

from __future__ import annotations

import dataclasses

from harness.report.data.rows import Row, Versus
from harness.report.figures import parity

__all__ = ["beside", "siblings_of"]


def siblings_of(rows: list[Row]) -> dict[int, Row]:
    """id of a row that alters the computation by design -> the plainest other row that alters the
    same: one of its own computation where there is one."""
    alike: dict[str, list[Row]] = {}
    for row in rows:
        if parity.design(row.first) and not row.spec.sampling:
            alike.setdefault(parity.design(row.first), []).append(row)
    pairs = [(row, _plain(row, same)) for same in alike.values() for row in same]
    return {id(row): other for row, other in pairs if other is not None}


def _plain(row: Row, rows: list[Row]) -> Row | None:
    """The row with the fewest parts of those of this row's computation, or of any; None where it
    is the plainest of all itself."""
    kind = parity.computation(row.first)
    own = [other for other in rows if parity.computation(other.first) == kind]
    for among in (own, rows):
        first = min(among, key=lambda other: (other.spec.recipe.count("+"), other.spec.recipe))
        if first is not row:
            return first
    return None


def beside(versus: Versus, row: Row, sibling: Row | None) -> Versus:
    """How a row stands to its sibling; it DIFFERS where it is further from that than explained."""
    if sibling is None:
        return versus
    far = parity.distances(row.first, sibling.first)
    fault = "" if versus.wrong else parity.against_sibling(row.first, sibling.first)
    kind = parity.computation(sibling.first)
    other = kind if kind != parity.computation(row.first) else ""
    versus = dataclasses.replace(
        versus,
        sibling=sibling.label + (f" ({other})" if other else ""),
        sibling_loss_distance=far.get("loss"),
        sibling_norm_distance=far.get("norm"),
    )
    if not fault:
        return versus
    return dataclasses.replace(versus, parity="DIFFERS", differs_in=f"{sibling.label}: {fault}")
