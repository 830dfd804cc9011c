"""The reference measured again over a suite, so that its results tell their own noise. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from harness.spec import Spec
from harness.suite.file import SuiteError

__all__ = ["with_reference_again"]


def with_reference_again(specs: Sequence[Spec], reference: str, times: int) -> list[Spec]:
    """``specs`` with further repetitions of the reference row, until it is measured ``times``
    times: spread evenly over the suite and the last one at its end, so that the machine's drift
    shows between them. Each is a run of its own, told from the first by ``repeat`` alone.

    Of several rows of that recipe, the one that most others can be compared with. Nothing is
    added to a row that is compared with no other, to a simulated world, which tells no times, or
    to recorded runs, which are not ranked.

    Args:
        reference: the recipe of the suite's reference row.
        times: 1 adds nothing; ``--repeat`` counts.

    Raises:
        SuiteError: ``times`` is below 1.
    """
    if times < 1:
        raise SuiteError(f"noise_floor is {times}; give --noise-floor at least 1 (1: no floor)")
    row = _reference(specs, reference)
    if row is None or row.world or row.recorded or len(_compared(row, specs)) < 2:
        return list(specs)
    there = sum(dataclasses.replace(spec, repeat=0) == row for spec in specs)
    return _spread(list(specs), row, there, times - there)


def _spread(specs: list[Spec], row: Spec, there: int, more: int) -> list[Spec]:
    """``row`` put in ``more`` times behind the first run: after equal shares of the others."""
    first = specs.index(row) + 1
    others, end = specs[first:], specs[:first]
    for index in range(more):
        taken = round(len(others) / (more - index))
        end += [*others[:taken], dataclasses.replace(row, repeat=there + index)]
        others = others[taken:]
    return end + others


def _reference(specs: Sequence[Spec], recipe: str) -> Spec | None:
    named = [spec for spec in specs if spec.recipe == recipe and spec.repeat == 0]
    return max(named, key=lambda spec: len(_compared(spec, specs)), default=None)


def _compared(row: Spec, specs: Sequence[Spec]) -> set[Spec]:
    """The rows, itself among them, that do the same work, and so are ranked with it."""
    work = _work(row)
    return {dataclasses.replace(spec, repeat=0) for spec in specs if _work(spec) == work}


def _work(spec: Spec) -> Spec:
    """A spec without what rows of one ranking may differ in."""
    return dataclasses.replace(spec, recipe="", processes=1, nodes=1, repeat=0)
