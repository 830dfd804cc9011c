"""How GPUs run at a moment: clocks, what holds them back, and how many processes are on them.

By nvidia-smi; empty where it is missing or does not know a field. No CUDA context.
"""

from __future__ import annotations

from harness.result import GpuSample
from harness.system import gpus

QUERY = "--query-gpu=index,uuid,clocks.sm,clocks.max.sm,temperature.gpu,{reasons}"
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The field's name today, and that of drivers before 535."""
APPS = "--query-compute-apps=gpu_uuid,pid"
BITS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of the mask that slow a GPU against its user's wish (nvml.h, nvmlClocksEventReasons). Not
here: idle, clocks that somebody set, and boost held in step with another GPU."""
MHZ = 10**6


def sample(when: str, count: int) -> list[GpuSample]:
    """The first ``count`` GPUs that CUDA_VISIBLE_DEVICES leaves, ``when`` as a note; none where
    CUDA counts them in another order, for a sample of another card is worse than none."""
    if not gpus.has_driver() or gpus.order() != gpus.BY_BUS:
        return []
    apps = gpus.smi(APPS)
    answers = (gpus.smi(QUERY.format(reasons=name)) for name in REASONS)
    lines = next(filter(None, answers), "")
    return gpus.chosen(parse(when, lines, apps))[:count]


def parse(when: str, gpu_lines: str, app_lines: str) -> list[GpuSample]:
    """nvidia-smi's two answers (CSV, MHz, no units) as samples; a line that it cannot read is left
    out, a number that is not told is 0."""
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
    """What the bits of '0x0000000000000024' say; nothing of '[N/A]'."""
    try:
        bits = int(mask, 16)
    except ValueError:
        return []
    return [name for bit, name in BITS.items() if bits & bit]
