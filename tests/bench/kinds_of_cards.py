"""How far what a recipe needs, and how long its step takes, are from what the trace for another
kind of card says (other kernels of attention), by which an atlas leaves recipes out
(``harness.commands.atlas.usual``).

    PYTHONPATH=. .venv/bin/python tests/bench/kinds_of_cards.py [--models M ...]

Every recipe of each model (default: all) on one, four and eight GPUs is judged against an H100-80GB
by its trace for that card, and by the one for an A100-80GB; predictions that are kept are taken
from there. The last line has the most that they differ by: the atlas allows for ``NEAR``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from harness.commands.atlas.atlas import add_arguments, places_of
from harness.commands.atlas.usual import NEAR
from harness.commands.console import make_console
from harness.commands.planning.plan.asking import judged
from harness.commands.planning.plan.progress import PlanProgress
from harness.predict import pool, workers
from harness.predict.verdict import Fit, judge
from harness.subjects.library import presets

CARDS = ["H100-80GB", "A100-80GB"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    options.cards, progress = CARDS, PlanProgress(make_console())
    worst = [0.0, 0.0]
    with workers.standing():
        for model in options.models or list(presets.table()):
            pairs = [
                (row, p.asked.gpu) for p in places_of(model, options) for row in p.asked.resolved
            ]
            fits = judged(pairs, _name, jobs=options.jobs or pool.default_jobs(), told=progress)
            for name, shares in _off(fits):
                worst = [max(pair) for pair in zip(worst, map(abs, shares), strict=True)]
                print(f"{shares[0]:+.2%} of memory, {shares[1]:+.2%} of time  {name}")
    print(f"up to {worst[0]:.2%} of memory and {worst[1]:.2%} of time (NEAR {NEAR:.0%})")


def _name(row, gpu) -> str:
    return f"{row.spec.model} {row.recipe}  {row.spec.processes} x {gpu.name}"


def _off(fits: list[Fit]) -> Iterator[tuple[str, tuple[float, float]]]:
    """Of each recipe and number of GPUs, by what share the other card's trace says more."""
    own, other = ({_key(f): f for f in fits if f.gpu.name == card} for card in CARDS)
    for key, fit in own.items():
        if fit.need_bytes is None:
            continue
        guess = judge(fit.resolved, other[key].prediction, fit.gpu)
        memory = guess.need_bytes / fit.need_bytes - 1
        time = guess.seconds.total / fit.seconds.total - 1
        yield _name(fit.resolved, fit.gpu), (memory, time)


def _key(fit: Fit) -> tuple[str, int]:
    return fit.label, fit.resolved.spec.processes


if __name__ == "__main__":
    main()
