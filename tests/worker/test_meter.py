"""The meter without a GPU against tensors of known size; the trace against known bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import highest, traced_here

from harness import ROOT
from harness.launch.command import ALLOCATOR
from harness.planner.tracing import trace
from harness.result import Peak
from harness.spec import Spec
from harness.system import gpus
from harness.system.gpus import Gpu
from harness.worker import measure, meter, projections, samples
from harness.worker.loop import optimizer_step

MIB = 2**20
CHILD = """
import json, torch
from harness.worker.meter import ResidentMeter
torch.ones(2**20).add_(1)
meter = ResidentMeter()
meter.enter("big")
kept = torch.ones(32 * 2**18)
lost = torch.ones(64 * 2**18)
del lost
meter.enter("small")
more = torch.ones(16 * 2**18)
meter.enter("big")
meter.close()
print(json.dumps([{k: p.allocated for k, p in meter.phases.items()}, meter.notes]))
"""


def measured(settings: dict[str, str]) -> tuple[dict[str, int], list[str]]:
    clean = {k: v for k, v in os.environ.items() if k not in ALLOCATOR}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=ROOT, env={**clean, **settings},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return tuple(json.loads(done.stdout))


def test_peaks_are_those_of_the_tensors_and_freed_memory_is_not_counted():
    phases, notes = measured(ALLOCATOR)
    assert phases["big"] == pytest.approx(96 * MIB, abs=3 * MIB)
    assert phases["small"] == pytest.approx(48 * MIB, abs=3 * MIB)
    assert notes == []


class Counts(meter.Meter):
    """A meter whose counts are given."""

    def __init__(self, *counts: Peak) -> None:
        super().__init__()
        self.counts = list(counts)

    def _reset(self, phase: str) -> None:
        """Nothing to reset."""

    def _read(self) -> Peak:
        return self.counts.pop(0)


def test_a_phase_keeps_the_maximum_of_each_count():
    """Not the counts of its fullest time: fewer tensors may have had more reserved around them."""
    first = Peak(allocated=100, reserved=120, process=150)
    again = Peak(allocated=90, reserved=160, process=None)
    counts = Counts(first, Peak(allocated=7), again)
    for phase in ("steady", "load", "steady"):
        counts.enter(phase)
    counts.close()
    assert counts.phases["steady"] == Peak(allocated=100, reserved=160, process=150)
    assert counts.phases["load"] == Peak(allocated=7)


def test_no_phase_counts_the_table_of_the_watch(train_here, monkeypatch):
    run = train_here(Spec(recipe="single", model="DiT-T/4", global_batch=8), 1)
    counts, seen = Counts(Peak(allocated=100)), []
    counts.enter("prepare")
    make = projections.signs
    monkeypatch.setattr(
        projections, "signs", lambda on: (seen.append(counts._running), make(on))[1]
    )
    run.meter = counts
    measure.watched(run)
    assert seen == [None] and counts.phases["prepare"].allocated == 100


def test_a_device_that_does_not_answer_lowers_nothing():
    def failing() -> int:
        raise RuntimeError("busy")

    highest = samples.Highest(failing)
    highest.value = 80
    assert highest.look() == 80


@pytest.fixture
def gpu(monkeypatch) -> SimpleNamespace:
    """torch.cuda of a device of 1,000 bytes of which ``used`` are, and torch's ``counts``."""
    gpu = SimpleNamespace(used=90, counts={"allocated_bytes.all.peak": 0})
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: (1000 - gpu.used, 1000))
    monkeypatch.setattr(cuda, "memory_stats", lambda device: dict(gpu.counts))
    reset = {"allocated_bytes.all.peak": 10}
    monkeypatch.setattr(
        cuda, "reset_peak_memory_stats", lambda device=None: gpu.counts.update(reset)
    )
    return gpu


def test_a_gpu_s_use_within_a_phase_counts_though_it_was_given_back(gpu):
    """As NCCL's buffers are when the phase ends; nothing looks while steps are timed."""
    found = meter.CudaMeter(torch.device("cuda", 0))
    for phase, seen in (("backward", 700), ("steady", 90)):
        found.enter(phase)
        assert found.used.running is (phase == "backward")
        gpu.used = 700
        while found.used.running and found.used.value < 700:
            time.sleep(0.001)
        gpu.used = 90
        found.close()
        assert found.phases[phase].process == seen and not found.used.running


@pytest.mark.parametrize(
    ("total", "used", "order", "counted"),
    [
        (1040, 60, "PCI_BUS_ID", 640),  # a desktop
        (4000, 60, "PCI_BUS_ID", 700),  # the device is a slice of the card
        (1040, 60, "FASTEST_FIRST", 700),  # perhaps another card's
        (1040, 900, "PCI_BUS_ID", 0),  # let go of meanwhile
    ],
)
def test_what_a_desktop_uses_is_not_needed_by_a_row(total, used, order, counted, gpu, monkeypatch):
    gpu.used = 700
    cards = [Gpu(index=i, name="a", total_bytes=total, used_bytes=used * i) for i in range(2)]
    monkeypatch.setattr(gpus, "visible", lambda: tuple(cards))
    monkeypatch.setenv(gpus.ORDER, order)
    found = meter.make_meter(torch.device("cuda", 1), meter.cards_before("cuda"))
    found.enter("steady")
    found.close()
    assert found.phases["steady"].process == found.baseline_bytes == counted
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert meter.cards_before("cuda") == meter.cards_before("cpu") == (), "our own context is there"


def test_a_peak_survives_a_library_that_resets_the_counts(gpu):
    """DeepSpeed's ZeRO-1 and 2 do so as they are made, in the middle of the phase."""
    counts = gpu.counts
    found = meter.CudaMeter(torch.device("cuda", 0))
    found.enter("prepare")
    counts["allocated_bytes.all.peak"] = 800
    torch.cuda.reset_peak_memory_stats(device=None)
    assert counts["allocated_bytes.all.peak"] == 10, "the library's own wish is done"
    assert found.peak_bytes() == 800
    counts["allocated_bytes.all.peak"] = 300
    found.enter("first_step")
    found.close()
    assert found.phases["prepare"].allocated == 800
    assert found.phases["first_step"].allocated == 10, "and no later phase has it"


@pytest.mark.thorough
def test_a_process_that_keeps_freed_memory_says_so():
    _, notes = measured({})
    assert len(notes) == 1 and "MALLOC_TRIM_THRESHOLD_=131072" in notes[0]


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("harness/loop.py", "harness/loop.py:7"),
        (".venv/lib/python3/site-packages/deepspeed/runtime/a.py", "deepspeed/runtime/a.py:7"),
        (".venv/lib/python3/site-packages/torch/_dynamo/eval_frame.py", ""),
    ],
)
def test_a_predicted_tensor_s_line_is_ours_or_a_training_library_s(file, place):
    assert trace._place(f"{ROOT}/{file}", 7) == place


def traced(train_here, recipe: str):
    run, found = traced_here(train_here, Spec(recipe=recipe, model="DiT-T/4", global_batch=8))
    return run, found


def test_the_trace_names_what_lives(train_here):
    run, found = traced(train_here, "single")
    trainable = sum(p.numel() for p in run.module.parameters() if p.requires_grad) * 4
    frozen = run.module.pos_embed.numel() * 4
    assert found.parameters == trainable + frozen
    assert found.ema == trainable
    # Two moments a weight, and one float32 step count a tensor.
    assert found.optimizer_state == pytest.approx(2 * trainable, abs=4096)
    assert found.activations > 0


def test_the_trace_sees_as_much_as_the_profiler(train_here):
    """torch.profiler's own allocation events, summed, reach the same height above the start."""
    run, found = traced(train_here, "single+ema:place=none")
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer_step(run, run.optimizer_steps)
    known = found.parameters + found.optimizer_state
    assert highest(profile) == pytest.approx(found.total - known, rel=0.02, abs=MIB)


def test_what_was_kept_before_the_peak_is_not_forgotten(train_here):
    """Checkpoints are gone when the last gradients arrive, where the peak of a step can be."""
    _, every = traced(train_here, "single+checkpoint")
    run, none = traced(train_here, "single+checkpoint:keep=nothing")
    assert every.activations + every.workspace == none.activations + none.workspace
    blocks = run.module.blocks
    token_bytes = 8 * 64 * 128 * 4
    assert every.beyond_state - none.beyond_state >= (len(blocks) - 2) * token_bytes


def test_gradients_are_there_at_the_peak_when_accumulating(train_here):
    run, found = traced(train_here, "single+accumulate:steps=4")
    trainable = sum(p.numel() for p in run.module.parameters() if p.requires_grad) * 4
    assert found.gradients == pytest.approx(trainable, rel=0.3)
