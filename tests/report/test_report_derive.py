"""Derived numbers, against values worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from harness.planner.comparison import predicted_and_measured
from harness.prediction import Prediction
from harness.report import build
from harness.report.figures import derive, units
from harness.report.figures.derive import peak_flops
from harness.report.figures.numbers import numbers
from harness.report.figures.units import CATEGORIES, STATE, in_sentence, title
from harness.result import Categories, Check, Peak, Rank, Result, Status
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


def traced(*sizes: int) -> Categories:
    names = ("parameters", "gradients", "optimizer_state", "ema", "activations", "workspace")
    return Categories(**dict(zip(names, sizes, strict=True)), phase="backward", where="mm")


@pytest.mark.parametrize(
    ("device", "kind", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5e12),
        ("NVIDIA A10", "bfloat16", 125e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165e12),
    ],
)
def test_peak_flops(device, kind, peak):
    assert peak_flops(device, kind) == (peak, None)


@pytest.mark.parametrize(
    ("device", "kind", "word"),
    [
        ("cpu", "float32", "CPU"),
        ("Abacus 3", "float32", "Abacus 3"),
        ("NVIDIA H200", None, "no precision"),
        ("NVIDIA H200", "float64", "float64"),
        ("NVIDIA H200", "float8", "float8"),
        ("Tesla T4", "bfloat16", "no bfloat16 unit"),
    ],
)
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


GPU = "NVIDIA H100 80GB HBM3"


def on_gpu(index: int = 0, **changes) -> Rank:
    return rank(index, device=GPU, **changes)


def test_what_was_not_traced_has_no_peak_on_a_cpu_and_keeps_its_resident_mark():
    found = numbers([result(rank())])
    assert (found.peak_bytes, found.need_bytes) == (None, None)
    assert (found.resident_peak_bytes, found.placed_by) == (100, None)


def test_one_function_decides_what_a_row_s_peak_is(monkeypatch):
    """docs/explanation/memory.md: every headline follows it; needs and predictions do not."""
    monkeypatch.setattr(
        derive, "peak_by_phase", lambda ranks: derive.highest_by_phase(ranks, "reserved")
    )
    phases = {"steady": Peak(allocated=100, reserved=130)}
    full = on_gpu(phases=phases, categories=traced(*[10] * 6))
    slim = on_gpu(1, phases={"load": Peak(allocated=90, reserved=65)})
    one = result(full, slim, meter="cuda")
    found = numbers([one])
    assert (found.peak_bytes, found.steady_metered_bytes) == (130, 100)
    assert found.untraced_bytes == 40
    assert build([one], []).groups[0].rows[0].numbers.peak_bytes == 130
    prediction = Prediction(recipe="ddp", device="cpu", method="trace", allocated=110)
    assert predicted_and_measured([one], {one.spec.key: prediction}).run_measured == 100


def test_a_row_that_died_keeps_what_its_meter_had_counted():
    gone = result(rank(), status=Status.GPU_OOM, reason="no room")
    assert build([gone], []).unfinished[0].so_far_bytes == 100


def test_the_categories_are_named_alike_everywhere():
    """One list; the fields that repeat its names for their types are held to it."""
    sizes = {name: 2**place for place, name in enumerate(CATEGORIES)}
    held = Categories(**sizes, phase="backward", where="mm")
    assert held.total == 2 ** len(CATEGORIES) - 1, "total leaves one out"
    found = dataclasses.asdict(numbers([result(rank(categories=held))]))
    assert {name: found[f"{name}_bytes"] for name in CATEGORIES} == sizes
    assert STATE == ("parameters", "gradients", "optimizer_state", "ema")
    titles = [title(name) for name in CATEGORIES]
    assert titles[2:4] == ["Optimizer state", "EMA"] and in_sentence("ema") == "EMA"


@pytest.mark.parametrize(
    ("curve", "reference", "expected"),
    [
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([1.0, 9.0], [1.0], 0.0),
        ([-1.0], [-2.0], 0.5),
        ([], [1.0], None),
        ([math.nan], [1.0], math.inf),
        ([1e-13], [0.0], 0.1),
    ],
)
def test_curve_distance(curve, reference, expected):
    found = derive.curve_distance(curve, reference)
    assert found == (None if expected is None else pytest.approx(expected))


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


@pytest.mark.parametrize(
    ("kind", "values", "cells"),
    [
        ("gib", [GIB, None, GIB // 2], ["1.00", "-", "0.50"]),
        ("gib", [GIB // 4], ["0.250"]),
        ("ms", [0.4125, 0.01], ["412.5", "10.0"]),
        ("ms", [1.9994], ["1999"]),
        ("rate", [38.784, 9.0], ["38.78", "9.00"]),
        ("percent", [0.1234], ["12.3"]),
        ("change", [-0.223, 0.096, -0.00001], ["-22.3", "+9.6", "0.0"]),
        ("ratio", [0.936], ["0.94"]),
        ("distance", [3.04e-7, 0.0, math.inf], ["3.0e-07", "0", "inf"]),
        ("text", ["a", None], ["a", "-"]),
        ("mib", [2**20], ["1.00"]),
    ],
)
def test_cells(kind, values, cells):
    assert units.column(kind, values) == cells
