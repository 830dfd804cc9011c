"""How far the need of a sample between two traced sizes is from the line through them, by which an
atlas seeks the next size that does not fit (``harness.planner.atlas.growth``).

    PYTHONPATH=. .venv/bin/python tests/bench/between_sizes.py [--models M ...]

Of each model (default: all) the atlas's cells are predicted, or taken from what is kept: an atlas
that was made before leaves nothing to predict. Of each size that it traced a line says how far it
was from the line through the usual and the largest one, from what the growth of a training that is
alike in its activations says (nothing, where it was between the most and the least of that), and
from what the same recipe on other cards, or more of them, grew by; the last lines have the most
that was needed more, and less, and what the atlas allows for.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Sequence

from harness.commands.console import make_console
from harness.planner import pool
from harness.planner import pool as workers
from harness.planner.atlas.cells import AtlasProgress, Replicas, predicted
from harness.planner.atlas.command import add_arguments, places_of
from harness.planner.atlas.growth import (
    ABOVE,
    BELOW,
    KIN,
    ROUNDED,
    Edge,
    between,
    edges_of,
    usual_cells,
)
from harness.subjects.library import families

LINE, GROWTH, ALIKE = "its own line", "the growth of what is alike", "what is alike at that size"
OTHERS = "the same recipe on other cards"
MARGINS = {LINE: (ABOVE, BELOW), GROWTH: (ABOVE, BELOW), ALIKE: ROUNDED, OTHERS: KIN}
"""How a size is told -> by what shares more may be needed, and less."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    progress = AtlasProgress(make_console(), len(families.table()))
    jobs = options.jobs or pool.default_jobs()
    ask = Replicas(functools.partial(predicted, jobs=jobs, progress=progress))
    found: dict[str, float] = {}
    with workers.kept_workers():
        for model in options.models or list(families.table()):
            cells = usual_cells(places_of(model, options), ask)
            for edge in edges_of(cells, ask, options.growth).values():
                found |= dict(off(edge))
    for name, share in sorted(found.items(), key=lambda item: item[1]):
        print(f"{share:+.1%}  {name}")
    for how, (above, below) in MARGINS.items():
        some = [0.0, *(share for name, share in found.items() if name.endswith(how))]
        print(f"{len(some) - 1} by {how}: up to {max(some):.1%} more (allowed {above:.0%})")
        print(f"and up to {-min(some):.1%} less (allowed {below:.0%})")


def off(edge: Edge) -> Iterator[tuple[str, float]]:
    """Of each size that was traced, by what share of the need that it was told to have it is above
    that; and how it was told."""
    for at, fit in edge.traced.items():
        if not fit.least_bytes:
            continue
        row, kind = fit.resolved, ",".join(fit.prediction.attention)
        name = f"{row.spec.model} {row.recipe} x {row.spec.processes}, {edge.sizes[at].name}"
        ways = {**by_line(edge, at), **by_alike(edge, at), **by_kin(edge, at)}
        for how, share in ways.items():
            yield f"{name} ({kind}), by {how}", share


def by_line(edge: Edge, at: int) -> dict[str, float]:
    """By the line through the usual size and the largest."""
    last = len(edge.sizes) - 1
    if at == last or last not in edge.traced:
        return {}
    share = (edge.sizes[at].times - 1) / (edge.sizes[last].times - 1)
    line = between(edge.usual, edge.traced[last], share)
    return {LINE: edge.traced[at].least_bytes / line - 1} if line else {}


def by_kin(edge: Edge, at: int) -> dict[str, float]:
    """By the same recipe on other cards, or more of them."""
    told = _untraced(edge, at).as_kin(at)
    return {OTHERS: edge.traced[at].least_bytes / told.most - 1} if told else {}


def _untraced(edge: Edge, at: int) -> Edge:
    """The edge before this size was traced, and without those that its trace is shared by."""
    here = edge.traced[at]

    def others(each: Sequence[Edge]) -> list[Edge]:
        at_it = [(one, one.traced.get(at)) for one in each]
        return [one for one, fit in at_it if not fit or fit.prediction is not here.prediction]

    smaller = {n: fit for n, fit in edge.traced.items() if n < at}
    return dataclasses.replace(edge, traced=smaller, alike=others(edge.alike), kin=others(edge.kin))


def by_alike(edge: Edge, at: int) -> dict[str, float]:
    """By others whose activations are alike, where nothing larger was traced of its own."""
    told = _untraced(edge, at).as_alike(at)
    if told is None:
        return {}
    how = ALIKE if told.margins == MARGINS[ALIKE] else GROWTH
    need = edge.traced[at].least_bytes
    return {how: need / told.most - 1 if need > told.most else min(0.0, need / told.least - 1)}


if __name__ == "__main__":
    main()
