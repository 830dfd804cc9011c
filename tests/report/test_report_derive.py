"""Derived numbers, against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from harness.report import build
from harness.report.figures import derive, units
from harness.report.figures.derive import peak_flops
from harness.report.figures.numbers import numbers
from harness.result import Check, Peak, Rank, Result, Status
from harness.spec import Spec
from harness.void import shown_status

GIB = 2**30


def rank(index: int = 0, *, seconds: list[float] | None = None, **changes) -> Rank:
    fields = {
        "rank": index,
        "device": "cpu",
        "baseline_bytes": 7,
        "phases": {"load": Peak(allocated=10), "steady": Peak(allocated=100)},
        "categories": None,
        "host_peak_bytes": 50,
        "pinned_bytes": 3,
        "nvme_bytes": 4,
        "warmup_seconds": [2.0, 1.0],
        "step_seconds": seconds or [1.0, 2.0, 3.0],
        "phase_seconds": {"start": 3.0, "load": 3.0, "prepare": 4.0, "measure": 9.0},
    }
    return Rank(**{**fields, **changes})


def result(*ranks: Rank, **changes) -> Result:
    spec = Spec(recipe="ddp", global_batch=16, processes=max(len(ranks), 1))
    return Result(**{"status": Status.OK, "spec": spec, "ranks": list(ranks), **changes})


@pytest.mark.parametrize(("device", "kind", "peak"), [
    ("NVIDIA H200", "bfloat16", 989e12), ("NVIDIA H100 80GB HBM3", "tf32", 494e12),
    ("NVIDIA A100-SXM4-80GB", "float32", 19.5e12),
])  # fmt: skip
def test_peak_flops(device, kind, peak):
    assert peak_flops(device, kind) == (peak, None)


@pytest.mark.parametrize(("device", "kind", "word"), [
    ("cpu", "float32", "CPU"), ("Abacus 3", "float32", "Abacus 3"),
    ("NVIDIA H200", None, "no precision"), ("Tesla T4", "bfloat16", "no bfloat16 unit"),
])  # fmt: skip
def test_no_peak_comes_with_a_reason(device, kind, word):
    peak, reason = peak_flops(device, kind)
    assert peak is None
    assert word in reason


def test_mfu():
    assert derive.mfu(98.9e12, "NVIDIA H200", "bfloat16") == pytest.approx(0.1)
    assert derive.mfu(1e12, "cpu", "float32") is None
    assert derive.mfu(None, "NVIDIA H200", "bfloat16") is None
    assert derive.mfu_missing(1e12, "NVIDIA H200", "bfloat16") is None
    assert "CPU" in derive.mfu_missing(1e12, "cpu", "float32")
    assert "FLOPs" in derive.mfu_missing(None, "NVIDIA H200", "bfloat16")


def test_what_was_not_traced_has_no_peak_on_a_cpu_and_keeps_its_resident_mark():
    found = numbers([result(rank())])
    assert (found.peak_bytes, found.need_bytes) == (None, None)
    assert (found.resident_peak_bytes, found.placed_by) == (100, None)


def test_a_row_that_died_keeps_what_its_meter_had_counted():
    gone = result(rank(), status=Status.GPU_OOM, reason="no room")
    assert build([gone], []).unfinished[0].so_far_bytes == 100


@pytest.mark.parametrize(
    ("points", "best"),
    [
        # Half the memory for a tenth of the speed, against a quarter for two tenths.
        ([(100, 10), (50, 9), (75, 8)], 1),
        # Saves a tenth, costs a half: it does not pay.
        ([(100, 10), (90, 5)], None),
        ([(100, 10)], None),
        ([], None),
    ],
)
def test_compromise(points, best):
    assert derive.compromise(points) == best


def test_a_failed_check_voids_an_ok_row():
    wrong = Check(name="micro batch", asked=[8], found=[4], ok=False)
    status, reason = shown_status(result(rank(), audit=[wrong]))
    assert status is Status.VOID
    assert reason == "micro batch: expected [8], found [4]"


def test_an_ok_row_without_steps_is_void():
    assert shown_status(result())[0] is Status.VOID
    assert shown_status(result(rank()))[0] is Status.OK


@pytest.mark.parametrize(("kind", "values", "cells"), [
    ("gib", [GIB, None, GIB // 2], ["1.00", "-", "0.50"]),
    ("ms", [0.4125, 0.01], ["412.5", "10.0"]), ("rate", [38.784, 9.0], ["38.78", "9.00"]),
    ("percent", [0.1234], ["12.3"]),
    ("change", [-0.223, 0.096, -0.00001], ["-22.3", "+9.6", "0.0"]), ("ratio", [0.936], ["0.94"]),
    ("distance", [3.04e-7, 0.0, math.inf], ["3.0e-07", "0", "inf"]),
])  # fmt: skip
def test_cells(kind, values, cells):
    assert units.column(kind, values) == cells
