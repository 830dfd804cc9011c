"""The meter without a GPU against tensors of known size; the trace against known bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from conftest import highest, traced_here

from harness import ROOT
from harness.launch import outcome
from harness.launch.command import ALLOCATOR
from harness.phases import PEAK_PHASES, RUN_PHASES
from harness.report.figures import derive
from harness.spec import Spec
from harness.system import gpus
from harness.system.gpus import Gpu
from harness.worker import meter, samples
from harness.worker.loop import Log, optimizer_step
from strategies.engine import STEP_PHASES

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


def test_nothing_looks_while_steps_are_timed_and_phases_are_known_to_all():
    assert [p for p in PEAK_PHASES if not samples.is_sampled(p)] == ["steady"]
    assert tuple(RUN_PHASES) == outcome.PHASES
    assert {*derive.PHASES, "warmup"} == set(PEAK_PHASES) > set(STEP_PHASES)


class Device:
    """torch.cuda of a device whose use is given."""

    def __init__(self, used: int) -> None:
        self.used, self.total = used, 1000

    def mem_get_info(self, device) -> tuple[int, int]:
        return self.total - self.used, self.total

    def memory_stats(self, device) -> dict[str, int]:
        return {"allocated_bytes.all.peak": 50, "reserved_bytes.all.peak": 70}

    def reset_peak_memory_stats(self, device) -> None:
        """Nothing is counted."""


def test_a_gpu_s_use_within_a_phase_counts_though_it_was_given_back(monkeypatch):
    gpu = Device(used=90)
    for name in ("mem_get_info", "memory_stats", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    found = meter.CudaMeter(torch.device("cuda", 0))
    for phase, seen in (("backward", 700), ("steady", 90)):
        found.enter(phase)
        assert found.sampler.running is (phase == "backward")
        gpu.used = 700
        while found.sampler.running and found.used.value < 700:
            time.sleep(0.001)
        gpu.used = 90
        found.close()
        assert found.phases[phase].process == seen and not found.sampler.running


@pytest.mark.parametrize(
    ("total", "used", "order", "counted"),
    [
        (1040, 60, "PCI_BUS_ID", 640),  # a desktop
        (4000, 60, "PCI_BUS_ID", 700),  # the device is a slice of the card
        (1040, 60, "FASTEST_FIRST", 700),  # perhaps another card's
    ],
)
def test_what_a_desktop_uses_is_not_needed_by_a_row(total, used, order, counted, monkeypatch):
    gpu = Device(used=700)
    for name in ("mem_get_info", "memory_stats", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    cards = [Gpu(index=i, name="a", total_bytes=total, used_bytes=used * i) for i in range(2)]
    monkeypatch.setattr(gpus, "visible", lambda: tuple(cards))
    monkeypatch.setenv(gpus.ORDER, order)
    found = meter.make_meter(torch.device("cuda", 1), meter.cards_before("cuda"))
    found.enter("steady")
    found.close()
    assert found.phases["steady"].process == found.baseline_bytes == counted
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert meter.cards_before("cuda") == meter.cards_before("cpu") == (), "our own context is there"


def test_a_peak_survives_a_library_that_resets_the_counts(monkeypatch):
    """DeepSpeed's ZeRO-1 and 2 do so as they are made, in the middle of the phase."""
    counts = {"allocated_bytes.all.peak": 0}
    gpu = Device(used=90)
    monkeypatch.setattr(torch.cuda, "mem_get_info", gpu.mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: dict(counts))
    reset = [counts.update, {"allocated_bytes.all.peak": 10}]
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device=None: reset[0](reset[1])
    )
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


def traced(train_here, recipe: str):
    run, _, found = traced_here(train_here, Spec(recipe=recipe, model="DiT-T/4", global_batch=8))
    return run, found


def test_the_trace_names_what_lives(train_here):
    run, found = traced(train_here, "single")
    trainable = sum(p.numel() for p in run.trained.module.parameters() if p.requires_grad) * 4
    frozen = run.trained.module.pos_embed.numel() * 4
    assert found.parameters == trainable + frozen
    assert found.ema == trainable
    # Two moments a weight, and one float32 step count a tensor.
    assert found.optimizer_state == pytest.approx(2 * trainable, abs=4096)
    assert found.activations > 0


def test_the_trace_sees_as_much_as_the_profiler(train_here):
    """torch.profiler's own allocation events, summed, reach the same height above the start."""
    run, found = traced(train_here, "single+ema:place=none")
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer_step(run, run.trained.optimizer_steps, Log())
    known = found.parameters + found.optimizer_state
    assert highest(profile) == pytest.approx(found.total - known, rel=0.02, abs=MIB)


def test_what_was_kept_before_the_peak_is_not_forgotten(train_here):
    """Checkpoints are gone when the last gradients arrive, where the peak of a step can be."""
    _, every = traced(train_here, "single+checkpoint")
    run, none = traced(train_here, "single+checkpoint:keep=nothing")
    assert every.activations + every.workspace == none.activations + none.workspace
    blocks = run.trained.module.blocks
    token_bytes = 8 * 64 * 128 * 4
    assert every.beyond_state - none.beyond_state >= (len(blocks) - 2) * token_bytes
