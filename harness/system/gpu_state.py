"""State of the GPUs at one moment: clocks, reasons for throttling, number of compute processes.

It comes from nvidia-smi and is empty if that is missing or lacks a field. It needs no CUDA context.
"""

from __future__ import annotations

from harness.result import GpuSample
from harness.system import gpus

QUERY = "--query-gpu=index,uuid,clocks.sm,clocks.max.sm,temperature.gpu,{reasons}"
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The field's name today, and its name in drivers before 535."""
APPS = "--query-compute-apps=gpu_uuid,pid"
BITS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of the mask that slow a GPU against its user's wish (nvml.h, nvmlClocksEventReasons).

Omitted are idle, clocks that a user set, and boost synchronized with another GPU.
"""
MHZ = 10**6


def sample(when: str, count: int) -> list[GpuSample]:
    """Sample the first ``count`` GPUs of CUDA_VISIBLE_DEVICES; ``when`` is a note.

    Empty if CUDA numbers them in another order: a sample of another GPU is worse than none.
    """
    if not gpus.has_driver() or gpus.order() != gpus.BY_BUS:
        return []
    apps = gpus.smi(APPS)
    answers = (gpus.smi(QUERY.format(reasons=name)) for name in REASONS)
    lines = next(filter(None, answers), "")
    return gpus.chosen(parse(when, lines, apps))[:count]


def parse(when: str, gpu_lines: str, app_lines: str) -> list[GpuSample]:
    """Parse nvidia-smi's two answers (CSV, MHz, no units) into samples.

    Unreadable lines are omitted; a missing number is 0.
    """
    on = [uuid for uuid, _ in gpus.rows(app_lines, 2)]
    return [
        GpuSample(
            when=when,
            index=gpus.number(index),
            uuid=uuid,
            sm_clock_hz=gpus.number(clock) * MHZ,
            max_sm_clock_hz=gpus.number(most) * MHZ,
            celsius=gpus.number(celsius),
            held_back_by=_names(mask),
            processes=on.count(uuid),
        )
        for index, uuid, clock, most, celsius, mask in gpus.rows(gpu_lines, 6)
    ]


def _names(mask: str) -> list[str]:
    """Return the reasons of a mask such as '0x0000000000000024'; empty for '[N/A]'."""
    try:
        bits = int(mask, 16)
    except ValueError:
        return []
    return [name for bit, name in BITS.items() if bits & bit]
