"""The dense peak FLOP/s of the device that a run names, for MFU."""

from __future__ import annotations

from harness.predict.speed import cards

__all__ = ["peak_flops"]


def peak_flops(device: str, precision: str | None) -> tuple[float | None, str | None]:
    """FLOP/s of ``device`` at ``precision``, and None; or None, and the reason why not."""
    if precision is None:
        return None, "no precision strategy showed the type it computes in"
    if device.lower() in ("cpu", ""):
        return None, "no peak is stated for a CPU"
    if precision not in cards.COLUMNS:
        return None, f"no peak is known for {precision}"
    gpu = cards.named(device)
    if gpu is None:
        return None, f"{device} is not in the table of peaks"
    flops = gpu.peaks[precision]
    return flops, None if flops else f"{device} has no {precision} unit"
