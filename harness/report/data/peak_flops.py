"""Dense peak FLOP/s of the device that a run names, for MFU; the table is the prediction's."""

from __future__ import annotations

from harness.predict import gpus

__all__ = ["lookup"]


def lookup(device: str, precision: str | None) -> tuple[float | None, str | None]:
    """Peak FLOP/s of ``device`` at ``precision``; or None, and the reason why not."""
    if precision is None:
        return None, "no precision strategy showed the type it computes in"
    if device.lower() in ("cpu", ""):
        return None, "no peak is stated for a CPU"
    if precision not in gpus.COLUMNS:
        return None, f"no peak is known for {precision}"
    gpu = gpus.named(device)
    if gpu is None:
        return None, f"{device} is not in the table of peaks"
    peak = gpu.peaks[precision]
    return peak, None if peak else f"{device} has no {precision} unit"
