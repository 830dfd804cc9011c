"""How far the need of a sample between two traced sizes is from the line through them, by which an
atlas seeks the next size that does not fit (``harness.commands.atlas.edge``).

    PYTHONPATH=. .venv/bin/python tests/bench/between_sizes.py [--models M ...]

Of each model (default: all) the atlas's cells are predicted, or taken from what is kept: an atlas
that was made before leaves nothing to predict. Of each size that it traced because it was near a
card a line says how far it was from the line through the usual and the largest one; the last lines
have the most that was needed more, and less: the atlas allows for ``ABOVE`` and ``BELOW``.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator

from harness.commands.atlas.atlas import add_arguments, places_of
from harness.commands.atlas.edge import ABOVE, BELOW, Edge, between
from harness.commands.atlas.places import edges_of, predicted, usual_cells
from harness.commands.atlas.progress import AtlasProgress
from harness.commands.console import make_console
from harness.predict import pool, workers
from harness.subjects.library import presets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    progress = AtlasProgress(make_console(), len(presets.table()))
    jobs = options.jobs or pool.default_jobs()
    ask = functools.partial(predicted, jobs=jobs, progress=progress)
    found: dict[str, float] = {}
    with workers.standing():
        for model in options.models or list(presets.table()):
            cells = usual_cells(places_of(model, options), ask)
            for edge in edges_of(cells, ask, options.growth).values():
                found |= off(edge)
    for name, share in sorted(found.items(), key=lambda item: item[1]):
        print(f"{share:+.1%}  {name}")
    most, least = max([0.0, *found.values()]), min([0.0, *found.values()])
    print(f"{len(found)} sizes needed up to {most:.1%} more than a line says (ABOVE {ABOVE:.0%})")
    print(f"and up to {-least:.1%} less (BELOW {BELOW:.0%})")


def off(edge: Edge) -> dict[str, float]:
    """Of each size that was traced between the usual and the largest, by what share of the line's
    need it is above the line."""
    return dict(_off(edge))


def _off(edge: Edge) -> Iterator[tuple[str, float]]:
    last = len(edge.sizes) - 1
    for at, fit in edge.traced.items():
        share = (edge.sizes[at].times - 1) / (edge.sizes[last].times - 1)
        line = between(edge.usual, edge.traced[last], share)
        if at != last and line and fit.least_bytes:
            row = fit.resolved
            kind = ",".join(fit.prediction.attention)
            name = f"{row.spec.model} {row.recipe} x {row.spec.processes}, {edge.sizes[at].name}"
            yield f"{name} ({kind})", fit.least_bytes / line - 1


if __name__ == "__main__":
    main()
