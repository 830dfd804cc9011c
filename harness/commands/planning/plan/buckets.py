"""A plan over a cache: the largest of its samples decide; what each of the other sizes takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from harness.commands.planning.plan.answer import gib, near
from harness.commands.planning.plan.asking import Asking
from harness.commands.planning.plan.row_json import fit_as_json
from harness.commands.planning.plan.table import LOOK, WORD
from harness.predict import verdict
from harness.predict.verdict import Fit
from harness.report.data.grid import text_grid
from harness.report.rendering.narrow import print_grid
from harness.resolve import Resolved, resolve

__all__ = ["Bucket", "as_json", "fits_of", "print_buckets"]

Bucket = Mapping[str, Any]
"""Fields of a spec that ask for samples of one size, and how many "samples" the cache has."""


def fits_of(fits: Sequence[Fit], buckets: Sequence[Bucket], asking: Asking) -> list[Fit]:
    """The recipe that answers the plan (the fastest that fits, or the nearest) at each size of the
    cache; none where nothing could be predicted."""
    answer = verdict.fastest(fits) or verdict.nearest(fits)
    if answer is None or not buckets:
        return []
    rows = [_at(answer.resolved, bucket) for bucket in buckets]
    return asking.fits(rows, f"{answer.label} at each size of the cache: ")


def _at(row: Resolved, bucket: Bucket) -> Resolved:
    sizes = {name: value for name, value in bucket.items() if name != "samples"}
    return resolve(dataclasses.replace(row.spec, **sizes))


def print_buckets(fits: Sequence[Fit], buckets: Sequence[Bucket], console: Console) -> None:
    """A line for each size, the largest first."""
    if not fits:
        return
    kinds = dict.fromkeys(("Sample", "Samples", "Needs", "Free", "Step ms"), "number")
    kinds |= {"Sample": "text", "": "flag"}
    lines = [_cells(*pair) for pair in zip(fits, buckets, strict=True)]
    order = ["Sample", "", "Samples", "Needs", "Free", "Step ms"]
    grid = text_grid("buckets", "", {head: kinds[head] for head in order}, lines)
    console.print(
        f"{fits[0].label} at each size of the cache; the plan above is of the largest:",
        highlight=False,
    )
    print_grid(grid, console, styles={"": {WORD[word]: look for word, look in LOOK.items()}})


def _cells(fit: Fit, bucket: Bucket) -> list[str]:
    size = fit.resolved.subject.size_in_words
    step = f"{fit.seconds.total * 1e3:.0f}" if fit.seconds else "-"
    need = [near(fit.need_bytes, fit.spread_bytes), gib(fit.margin_bytes)]
    return [size, WORD[fit.verdict], str(bucket["samples"]), *need, step]


def as_json(fits: Sequence[Fit], buckets: Sequence[Bucket]) -> list[dict[str, Any]]:
    """The same as JSON."""
    return [{**bucket, **fit_as_json(fit)} for fit, bucket in zip(fits, buckets, strict=False)]
