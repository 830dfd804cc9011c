"""Rows that ran on an H100: their page, and their predictions made anew."""

from __future__ import annotations

import dataclasses
import re

from harness.planner import overhead, pool
from harness.prediction import Instant
from harness.resolve import resolve
from tests.made import h100
from tests.made.pages import tables

SAMPLE = ("single+bf16", "zero3+lora")


def test_the_page_has_the_rows():
    on_page = tables(h100.PAGE.read_text(encoding="utf-8"))
    for made in (h100.summary(), h100.table(), h100.beside()):
        assert "\n".join(made) + "\n" in on_page


def test_predictions_are_within_the_goals():
    """Those of ``harness.planner.calibrate.table``, which were stated before a GPU was measured."""
    assert max(h100.errors("traced")) < 0.0005 and len(h100.errors("traced")) > 40
    assert max(h100.errors("allocated")) < 0.03
    assert max(h100.errors("reserved")) < 0.10


def test_a_sample_is_predicted_anew_as_it_was(tmp_path):
    kept = {row.spec: (row, found) for row, found in h100.rows() if row.spec.recipe in SAMPLE}
    rows = [resolve(spec) for spec in kept]
    kind = overhead.taken(next(iter(kept.values()))[0].environment)
    assert len(rows) == len(SAMPLE)
    for one, (_, found) in zip(
        pool.predict_all(rows, tmp_path, kind=kind), kept.values(), strict=True
    ):
        names = ("bytes", "allocated", "reserved", "least")
        assert [getattr(one, n) for n in names] == [getattr(found, n) for n in names]
        assert told(one.steady) == told(found.steady)


def told(instant: Instant) -> str:
    """An instant as text, without line numbers."""
    return re.sub(r"(\.py):\d+", r"\1", str(dataclasses.asdict(instant)))


def test_what_a_process_holds_beside_the_allocator_is_what_plans_add():
    """Within 100 MiB, on the card that the figures are of."""
    for row, _ in h100.rows():
        steady = row.ranks[0].phases["steady"]
        if steady.process is None:
            continue
        gpu = h100.card(row)
        sharding = row.spec.recipe.partition("+")[0]
        added = overhead.fixed_overhead(gpu, 1, sharding)
        held = steady.process - steady.reserved
        assert abs(added.context + added.communication - held) < 100 * 2**20, row.spec.recipe
