"""How far what a recipe needs, and how long its step takes, are from what the trace for another
kind of card says (other kernels of attention), by which an atlas leaves recipes out
(``harness.planner.atlas.growth``).

    PYTHONPATH=. .venv/bin/python tests/bench/kinds_of_cards.py [--models M ...]

Of what an atlas kept, every recipe that it traced for both an A100 and an H100 is judged against an
H100-80GB by each of the two. The last line has the most that they differ by: the atlas allows for
``NEAR``. Nothing is predicted here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from harness.planner import pool
from harness.planner.atlas.command import add_arguments, places_of
from harness.planner.atlas.growth import NEAR
from harness.planner.verdict import judge
from harness.subjects.library import families

KINDS = ("cudnn", "flash")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    options.cards = ["H100-80GB"]
    found = {
        name: shares
        for model in options.models or list(families.table())
        for name, shares in differing(model, options)
    }
    if not found:
        print("no recipe was traced for both kinds: ./run.sh atlas first", file=sys.stderr)
        return 1
    for name, (memory, seconds) in sorted(found.items(), key=lambda item: item[1]):
        print(f"{memory:+.2%} of memory, {seconds:+.2%} of seconds  {name}")
    memory, seconds = (max(map(abs, shares)) for shares in zip(*found.values(), strict=True))
    print(f"{len(found)} recipes: up to {memory:.2%} and {seconds:.2%} (NEAR {NEAR:.0%})")
    return 0


def differing(model: str, options: argparse.Namespace) -> Iterator[tuple[str, tuple[float, float]]]:
    """Of each recipe and number of GPUs, by what share the other kind's trace says more."""
    folder = pool.default_folder()
    for place in places_of(model, options):
        for row in place.asked.resolved:
            kept = [pool.cached(row, folder, kind) for kind in KINDS]
            if any(one is None or one.method != "trace" for one in kept):
                continue
            own, other = (judge(row, one, place.asked.gpu) for one in kept)
            seconds = other.seconds.total / own.seconds.total - 1
            name = f"{model} {row.recipe} x {row.spec.processes}"
            yield name, (other.least_bytes / own.least_bytes - 1, seconds)


if __name__ == "__main__":
    sys.exit(main())
