"""How far the need of a sample between two traced sizes is from the line through them, by which an
atlas seeks the next size that does not fit (``harness.commands.atlas.edge``).

    PYTHONPATH=. .venv/bin/python tests/bench/between_sizes.py [--models M ...] [--each 3]

Of each model some cells of the published atlas are drawn, and their recipes traced with the usual
sample, twice, four and eight times its elements. A line says of a line each; the last line has the
most that was needed more, and less, than a line said: the atlas allows for ``ABOVE`` and ``BELOW``.
"""

from __future__ import annotations

import argparse
import csv
import random
from collections.abc import Sequence

from harness import ROOT
from harness.commands.atlas.edge import ABOVE, BELOW, between
from harness.commands.atlas.sizes import Size, larger
from harness.commands.planning.plan.asked import Asked, asked_for
from harness.commands.planning.plan.command import add_arguments as plan_arguments
from harness.predict import attention, pool, verdict
from harness.predict.verdict import Fit

MODELS = ("pixart-sigma", "dit-xl-2", "sd3-medium", "ltx-video-2b", "sana-1.6b", "lumina2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--each", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, most, less = random.Random(options.seed), 0.0, 0.0
    for model in options.models:
        for asked in drawn(model, options.each, draw):
            for share in off(asked):
                most, less = max(most, share), min(less, share)
    print(f"needed more than a line says: {most:.1%} at the most (ABOVE {ABOVE:.0%})")
    print(f"needed less than a line says: {-less:.1%} at the most (BELOW {BELOW:.0%})")


def drawn(model: str, count: int, draw: random.Random) -> list[Asked]:
    """Cells of the atlas with other recipes or numbers of GPUs than each other."""
    text = (ROOT / "docs/atlas/atlas.csv").read_text(encoding="utf-8")
    cells = [c for c in csv.DictReader(text.splitlines()) if c["Model"] == model]
    able = {(c["Recipe"], c["GPUs"]): c["Command"].split()[2:] for c in cells if c["Fits"] == "yes"}
    parser = argparse.ArgumentParser()
    plan_arguments(parser)
    some = draw.sample(sorted(able), min(count, len(able)))
    return [asked_for(parser.parse_args(able[key])) for key in some]


def off(asked: Asked) -> list[float]:
    """Of each size between the usual and the largest, by what share of it its trace is above the
    line."""
    usual = asked.resolved[0]
    sizes = [Size(row=usual, times=1.0), *larger(usual, 3)]
    first, *inner, last = fits = traced(asked, sizes)
    steps = [(size.times - 1) / (sizes[-1].times - 1) for size in sizes[1:-1]]
    told = [between(first, last, share) for share in steps]
    if None in told or any(fit.least_bytes is None for fit in fits):
        print(f"{usual.spec.model}  {first.label}: no line", flush=True)
        return []
    found = [fit.least_bytes / line - 1 for fit, line in zip(inner, told, strict=True)]
    words = "  ".join(f"{s.name} {x:+.1%}" for s, x in zip(sizes[1:], found, strict=False))
    print(f"{usual.spec.model}  {first.label} x {usual.spec.processes}: {words}", flush=True)
    return found


def traced(asked: Asked, sizes: Sequence[Size]) -> list[Fit]:
    """The fits of sizes, by traces alone."""
    rows, gpu = [size.row for size in sizes], asked.gpu
    kind = attention.preferred(gpu.capability)
    found = pool.predict_all(rows, pool.default_folder(), kind=kind)
    return [verdict.judge(row, one, gpu) for row, one in zip(rows, found, strict=True)]


if __name__ == "__main__":
    main()
