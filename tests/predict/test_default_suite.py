"""The default suite on CPUs shows what it is there to show: its model is not weights alone."""

from __future__ import annotations

import dataclasses

import pytest

from harness.memory.record import as_measured
from harness.planner import pool
from harness.resolve import resolve
from harness.suite import matrix
from harness.suite.file import load_suite

pytestmark = pytest.mark.thorough


def test_half_of_plain_ddp_s_peak_are_activations(tmp_path):
    """What saves activations is to show; of a DiT with few tokens and wide layers it does not."""
    reference, *_ = matrix.specs(load_suite("default", "cpu"), {})
    assert reference.recipe == "ddp"
    weights = dataclasses.replace(reference, model="DiT-S/4:depth=2")
    shares = []
    for found in pool.predict_all([resolve(reference), resolve(weights)], tmp_path):
        assert found.method == "trace", found.reason
        held = as_measured(found.steady, found.buckets)
        shares.append(held.activations / held.total)
    assert shares[0] >= 0.5 > 0.3 > shares[1], shares
