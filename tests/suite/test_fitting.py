"""The batch of a suite: it fits the smallest GPU, by a rule that the trace holds."""

import dataclasses

import pytest

from harness.planner import pool
from harness.resolve import resolve
from harness.spec import Spec
from harness.suite import matrix

GIB = 2**30


@pytest.mark.parametrize(
    ("model", "gib", "processes", "wanted"),
    [
        ("DiT-XL/2", 139, 1, 64),
        ("DiT-XL/2", 80, 8, 32),  # the paper's global batch of 256
        ("DiT-XL/2", 24, 2, 8),
        ("DiT-XL/2", 12, 1, 4),  # not even the state fits: the rows that save memory are left
        ("DiT-T/8", 24, 1, 64),
    ],
)
def test_the_batch_of_a_suite_fits_the_smallest_gpu(model, gib, processes, wanted):
    settings, room = {"model": model, "data": "synthetic"}, matrix.HEADROOM * gib * GIB
    assert matrix.fitting_batch(settings, gib * GIB, processes) == wanted
    if wanted not in (matrix.most(processes), 4):
        subject = resolve(Spec(recipe="ddp", **settings)).subject
        fits = [matrix.plain_bytes(subject, n * wanted, ema=True) <= room for n in (1, 2)]
        assert fits == [True, False]


@pytest.mark.thorough
def test_the_rule_of_thumb_is_the_trace_within_two_percent(tmp_path):
    """Of states that outweigh activations, and of activations that outweigh states."""
    plain = Spec(recipe="ddp", model="", data="synthetic", device="cuda", processes=2)
    cases = [("DiT-S/4", 64, 0.9), ("DiT-B/8", 4, 0.0), ("DiT-B/2", 16, 0.9), ("DiT-L/2", 16, 0.0)]
    specs = [dataclasses.replace(plain, model=m, global_batch=2 * n, ema=e) for m, n, e in cases]
    rows = [resolve(spec) for spec in specs]
    found = pool.predict_all(rows, tmp_path)
    for row, (_, samples, ema), one in zip(rows, cases, found, strict=True):
        assert one.method == "trace", one.reason
        rule = matrix.plain_bytes(row.subject, samples, ema=ema > 0)
        assert rule == pytest.approx(one.steady.bytes, rel=0.02), row.spec.model
