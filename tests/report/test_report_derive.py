"""Derived numbers, against values worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from harness.report import build
from harness.report.figures import derive
from harness.report.figures.numbers import numbers
from harness.result import Check, Peak, Result, Status
from harness.void import shown_status
from tests.made.results import ok


def result(**changes) -> Result:
    """A row of three steps, of which nothing was traced."""
    made = ok("ddp")
    made.ranks[0].phases = {"load": Peak(allocated=10), "steady": Peak(allocated=100)}
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(("device", "kind", "peak"), [
    ("NVIDIA H200", "bfloat16", 989e12), ("NVIDIA H100 80GB HBM3", "tf32", 494e12),
    ("NVIDIA A100-SXM4-80GB", "float32", 19.5e12),
    ("cpu", "float32", "CPU"), ("Abacus 3", "float32", "Abacus 3"),
    ("NVIDIA H200", None, "no precision"), ("Tesla T4", "bfloat16", "no bfloat16 unit"),
])  # fmt: skip
def test_a_peak_is_known_or_its_lack_has_a_reason(device, kind, peak):
    found, reason = derive.peak_flops(device, kind)
    if isinstance(peak, str):
        assert found is None and peak in reason
        assert derive.mfu(1e12, device, kind) is None
        assert peak in derive.mfu_missing(1e12, device, kind)
    else:
        assert (found, reason) == (peak, None)
        assert derive.mfu(0.1 * peak, device, kind) == pytest.approx(0.1)
        assert derive.mfu(None, device, kind) is None
        assert "FLOPs" in derive.mfu_missing(None, device, kind)


def test_what_was_not_traced_has_no_peak_on_a_cpu_and_keeps_its_resident_mark():
    found = numbers([result()])
    assert (found.peak_bytes, found.need_bytes) == (None, None)
    assert (found.resident_peak_bytes, found.placed_by) == (100, None)


def test_a_row_that_died_keeps_what_its_meter_had_counted():
    gone = result(status=Status.GPU_OOM, reason="no room")
    assert build([gone], []).unfinished[0].so_far_bytes == 100


def test_compromise():
    best = derive.compromise([(100, 10), (50, 9), (75, 8)])
    assert best == 1, "half the memory for a tenth of the speed, not a quarter for two tenths"
    for points in ([(100, 10), (90, 5)], [(100, 10)], []):
        assert derive.compromise(points) is None, "to save a tenth for a half does not pay"


def test_a_failed_check_voids_an_ok_row():
    wrong = Check(name="micro batch", asked=[8], found=[4], ok=False)
    status, reason = shown_status(result(audit=[wrong]))
    assert status is Status.VOID
    assert reason == "micro batch: expected [8], found [4]"


def test_an_ok_row_without_steps_is_void():
    assert shown_status(result(ranks=[]))[0] is Status.VOID
    assert shown_status(result())[0] is Status.OK
