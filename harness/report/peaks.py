"""Dense peak FLOP/s of devices, for MFU. Vendors' data sheets, without structured sparsity."""

from __future__ import annotations

import re

__all__ = ["lookup"]

# (pattern in the device's name, bf16 or fp16, fp32, tf32), in FLOP/s. The first match counts, so
# the particular stands before the general. Sources: the NVIDIA data sheets of each board (the
# tensor-core figures there are printed with sparsity from H100 on and are halved here); Ada and
# Ampere white papers for GeForce, where tensor cores accumulate in fp32 at half rate; AMD's
# MI300X data sheet. None: the device has no such unit.
PEAKS: tuple[tuple[str, float | None, float, float | None], ...] = (
    (r"\bB200\b", 2250e12, 75e12, 1125e12),
    (r"\bG?H200\b", 989e12, 67e12, 494e12),
    (r"\bH100 PCIe\b", 756e12, 51e12, 378e12),
    (r"\bH100 NVL\b", 835e12, 60e12, 417e12),
    (r"\bH100\b", 989e12, 67e12, 494e12),
    (r"\bA100\b", 312e12, 19.5e12, 156e12),
    (r"\bA40\b", 149.7e12, 37.4e12, 74.8e12),
    (r"\bA10\b", 125e12, 31.2e12, 62.5e12),
    (r"\bRTX A6000\b", 154.8e12, 38.7e12, 77.4e12),
    (r"\bRTX 6000 Ada\b", 364e12, 91.1e12, 182e12),
    (r"\bL40S\b", 362e12, 91.6e12, 183e12),
    (r"\bL4\b", 121e12, 30.3e12, 60e12),
    (r"\bRTX 4090\b", 165e12, 82.6e12, 82.6e12),
    (r"\bRTX 3090\b", 71e12, 35.6e12, 35.6e12),
    (r"\bV100\b", None, 15.7e12, None),
    (r"\bT4\b", None, 8.1e12, None),
    (r"\bMI300X\b", 1307e12, 163.4e12, 653.7e12),
)
COLUMN = {"bfloat16": 1, "float16": 1, "float32": 2, "tf32": 3}


def lookup(device: str, precision: str | None) -> tuple[float | None, str | None]:
    """Peak FLOP/s of ``device`` at ``precision``; or None, and the reason why not."""
    if precision is None:
        return None, "no precision strategy showed the type it computes in"
    if device.lower() in ("cpu", ""):
        return None, "no peak is stated for a CPU"
    if precision not in COLUMN:
        return None, f"no peak is known for {precision}"
    for row in PEAKS:
        if re.search(row[0], device, re.IGNORECASE):
            peak = row[COLUMN[precision]]
            return peak, None if peak else f"{device} has no {precision} unit"
    return None, f"{device} is not in the table of peaks"
