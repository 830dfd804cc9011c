"""Which rows alter the computation alike, and how each stands to the plainest of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

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
    return {id(row): other for same in alike.values() for row, other in _plainest(same)}


def _plainest(rows: list[Row]) -> Iterator[tuple[Row, Row]]:
    """Each row and the row with the fewest parts of those of its computation, or of any; the row
    that is the plainest of all itself has none."""
    first: dict[str, Row] = {}
    ordered = sorted(rows, key=lambda row: (row.spec.recipe.count("+"), row.spec.recipe))
    for row in ordered:
        first.setdefault(parity.computation(row.first), row)
    for row in rows:
        own = first[parity.computation(row.first)]
        other = own if own is not row else ordered[0]
        if other is not row:
            yield row, other


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
