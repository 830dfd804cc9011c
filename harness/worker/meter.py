"""Peak memory of each of ``harness.phases.PEAK_PHASES`` on one rank, read between untimed steps.

``CudaMeter`` reads torch's caching allocator. ``ResidentMeter`` serves machines without a GPU: it
reads the kernel's resident high-water mark above a baseline taken before the model is built. Host
memory then replaces device memory, and every result says so.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness.launch.command import ALLOCATOR
from harness.phases import PEAK_PHASES
from harness.result import Peak
from harness.system import gpus
from harness.system.gpus import Gpu
from harness.system.machine import SLICE
from harness.worker.samples import Highest


def highest(*peaks: Peak | None) -> Peak:
    """Return the maximum of each count, possibly of different instants; None if all are unknown."""
    most: Any = {}
    for name in (f.name for f in dataclasses.fields(Peak)):
        values = [getattr(peak, name) for peak in peaks if peak is not None]
        most[name] = max((v for v in values if v is not None), default=None)
    return Peak(**most)


class Meter:
    """Peaks by phase. Entering a phase closes the previous one; one that is entered again keeps the
    maximum of each count."""

    kind = ""
    baseline_bytes = 0

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.phases: dict[str, Peak] = {}
        self._running: str | None = None
        self._noted: Peak | None = None

    def enter(self, phase: str) -> None:
        """Close the current phase and begin ``phase`` with peaks reset."""
        self.close()
        self._reset(phase)
        self._running = phase

    def close(self) -> None:
        """Close the current phase."""
        if self._running is None:
            return
        self.note()
        self.phases[self._running] = highest(self.phases.get(self._running), self._noted)
        self._running = self._noted = None

    def note(self) -> None:
        """Store the current phase's peak so far, before a caller resets the counts."""
        if self._running is not None:
            self._noted = highest(self._noted, self._read())

    def peak_bytes(self) -> int:
        """Return the largest ``allocated`` of all phases so far, including the current one."""
        peaks = [p.allocated for p in self.phases.values()]
        if self._running is None and peaks:  # between phases the mark may include freed memory
            return max(peaks)
        noted = [] if self._noted is None else [self._noted.allocated]
        return max([*peaks, *noted, self._read().allocated])

    def synchronize(self) -> None:
        """Wait until the device has finished all submitted work; a CPU has when a call returns."""

    def _reset(self, phase: str) -> None:
        raise NotImplementedError

    def _read(self) -> Peak:
        raise NotImplementedError


class CudaMeter(Meter):
    """The caching allocator's peaks, and the device's own count of used bytes.

    ``process`` is the device's total minus free bytes (cudaMemGetInfo): the allocator's reserve,
    the CUDA context, NCCL and library workspaces. It is the maximum of samples at the end of the
    phase and, if its steps are not timed, during it. It belongs to this process only: a run is
    refused on a GPU that other jobs use, and the memory that a desktop used before is subtracted.

    Args:
        before: the GPUs before this process had a context (``cards_before``).
    """

    kind = "cuda"

    def __init__(self, device: torch.device, before: Sequence[Gpu] = ()) -> None:
        super().__init__()
        self.device = device
        self._used_before = _used_before(device, before)
        self.used = Highest(self._used)
        self.baseline_bytes = self._used()
        self._reset_counts = torch.cuda.reset_peak_memory_stats
        torch.cuda.reset_peak_memory_stats = self._reset_by_others

    def close(self) -> None:
        self.used.stop()
        super().close()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _used(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return max(0, total - free - self._used_before)

    def _reset_by_others(self, *given: Any, **named: Any) -> None:
        """Replace torch's own reset. DeepSpeed's ZeRO-1 and 2 reset the counts during their
        construction (0.19.8, ``runtime/utils.py``, ``empty_cache``), in the middle of a phase whose
        peak came earlier."""
        self.note()
        self._reset_counts(*given, **named)

    def _reset(self, phase: str) -> None:
        self._reset_counts(self.device)
        self.used.reset()
        if phase in PEAK_PHASES and phase != "steady":  # whose steps are timed
            self.used.start()

    def _read(self) -> Peak:
        stats = torch.cuda.memory_stats(self.device)
        return Peak(
            allocated=stats.get("allocated_bytes.all.peak", 0),
            reserved=stats.get("reserved_bytes.all.peak", 0),
            process=self.used.look(),
        )


class ResidentMeter(Meter):
    """The process's resident high-water mark (VmHWM) above a baseline.

    It follows live tensors only while freed memory returns to the kernel at once. That needs
    ``launch.command.ALLOCATOR`` in the environment when the process starts;
    ``harness.worker.samples`` ends it before the timed steps.
    """

    kind = "resident"

    def __init__(self) -> None:
        super().__init__()
        unset = [f"{k}={v}" for k, v in ALLOCATOR.items() if os.environ.get(k) != v]
        if unset:
            wanted = " ".join(unset)
            text = f"freed memory may still be counted: start with {wanted} in the environment"
            self.notes.append(text)
        self._reset("")
        self.baseline_bytes = resident_peak_bytes()

    def _reset(self, phase: str) -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)  # returns freed pages to the kernel, so that the mark starts at memory in use
        try:
            # Resets the high-water mark to the current resident size (proc(5), since 4.0).
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            note = (
                "the kernel would not reset the high-water mark: a phase may show an earlier peak"
            )
            if note not in self.notes:
                self.notes.append(note)

    def _read(self) -> Peak:
        peak = resident_peak_bytes()
        return Peak(allocated=max(0, peak - self.baseline_bytes), process=peak)


def make_meter(device: torch.device, before: Sequence[Gpu] = ()) -> Meter:
    """Return the meter for ``device``; ``before``: the GPUs before the process used one."""
    return CudaMeter(device, before) if device.type == "cuda" else ResidentMeter()


def cards_before(kind: str) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA will number, before this process has a context on one.

    Empty if it has one, if CUDA's order differs from nvidia-smi's, or for another ``kind``.
    """
    late = kind != "cuda" or torch.cuda.is_initialized()
    return () if late or gpus.order() != gpus.BY_BUS else gpus.visible()


def _used_before(device: torch.device, before: Sequence[Gpu]) -> int:
    """Return the bytes in use on the GPU of ``device`` before; 0 for a part of a GPU (MIG)."""
    total, place = torch.cuda.mem_get_info(device)[1], device.index or 0
    whole = place < len(before) and total > SLICE * before[place].total_bytes
    return before[place].used_bytes if whole else 0


def resident_peak_bytes() -> int:
    """Return the resident high-water mark of this process, in bytes."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
