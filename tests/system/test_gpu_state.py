"""Clocks, throttling and other processes of GPUs, as nvidia-smi would tell; never seen on one."""

from __future__ import annotations

import dataclasses

import pytest

from harness.report.figures.derive import hindered, spilled
from harness.result import GpuSample, Peak
from harness.system import gpus
from tests.made.results import GIB, ok

LINES = """0, GPU-aa, 1980, 1980, 61, 0x0000000000000000
1, GPU-bb, 1410, 1980, 84, 0x0000000000000065
2, GPU-cc, [N/A], [N/A], 40, [N/A]
nonsense
"""
APPS = "GPU-aa, 100, python, 9\nGPU-bb, 101, python, 9\nGPU-bb, 999, [N/A], [N/A]\n"


def test_what_nvidia_smi_says_is_read():
    first, second, third = gpus.parse_states("before", LINES, APPS)
    assert first == GpuSample(
        when="before", index=0, uuid="GPU-aa", sm_clock_hz=1_980_000_000,
        max_sm_clock_hz=1_980_000_000, celsius=61, held_back_by=[], processes=1,
    )  # fmt: skip
    slow = ["software power cap", "software thermal slowdown", "hardware thermal slowdown"]
    assert second.held_back_by == slow and second.processes == 2, "the bit of idleness is none"
    assert (third.sm_clock_hz, third.held_back_by, third.processes) == (0, [], 0)


def test_old_drivers_are_asked_by_the_old_name_and_only_the_run_s_gpus_count(monkeypatch):
    asked = []

    def smi(query):
        asked.append(query)
        old = "clocks_throttle_reasons" in query
        return APPS if query == gpus.APP_QUERY else LINES * old

    monkeypatch.setattr(gpus, "has_driver", lambda: True)
    monkeypatch.setattr(gpus, "smi", smi)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1,0")
    assert [s.index for s in gpus.sample("after", 2)] == [2, 1]
    assert len(asked) == 3
    monkeypatch.setattr(gpus, "smi", lambda query: "")  # nvidia-smi is missing
    assert gpus.sample("after", 2) == []


def at(when: str, **more) -> GpuSample:
    usual = {"index": 0, "uuid": "GPU-aa", "sm_clock_hz": 1_900_000_000, "celsius": 60}
    free = {"max_sm_clock_hz": 1_980_000_000, "held_back_by": [], "processes": 1}
    return GpuSample(when=when, **{**usual, **free, **more})


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({}, []),
        ({"sm_clock_hz": 1_850_000_000}, []),  # a step or two of the clock
        ({"sm_clock_hz": 1_500_000_000}, ["GPU 0 clock 1900 -> 1500 MHz"]),
        ({"sm_clock_hz": 0}, []),  # not told
        ({"held_back_by": ["power brake"]}, ["GPU 0 held back by power brake"]),
        ({"processes": 2}, ["GPU 0 shared by 2 processes"]),
        ({"processes": 0}, []),  # a container that does not show even ours
    ],
)
def test_what_was_in_the_way_is_said(after, said):
    assert hindered([at("before"), at("after", **after)]) == said


@pytest.mark.parametrize(
    ("held", "card", "said"), [(13, 12, True), (12, 12, False), (13, 0, False)]
)
def test_memory_that_windows_moved_to_the_host_is_said(held, card, said):
    found = ok("single")
    found.environment["device_bytes"] = card * GIB
    found.ranks[0].phases["steady"] = Peak(allocated=GIB, reserved=held * GIB)
    assert any("13.0 GiB on a GPU of 12.0 GiB" in word for word in spilled(found)) is said
    found.ranks.append(dataclasses.replace(found.ranks[0], device="another GPU"))
    assert spilled(found) == []
