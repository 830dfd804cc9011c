"""Calibrations, made up: numbers chosen so that what follows from them can be told by hand."""

from __future__ import annotations

from typing import Any

from harness.planner.calibration.record import (
    AttentionRate,
    Calibration,
    Ceilings,
    Collective,
    Device,
    MeasuredRow,
    StandingBytes,
    Stream,
)

GIB, MIB = 2**30, 2**20
H200 = Device(
    name="NVIDIA H200", kind="cuda", memory_bytes=139 * GIB, cores=16, torch="2.13.0+cu130",
    driver="580.65", capability=[9, 0],
)  # fmt: skip
CPU = Device(
    name="Intel(R) Xeon(R) Processor, 2 cores", kind="cpu", memory_bytes=24 * GIB, cores=2,
    torch="2.13.0+cpu",
)  # fmt: skip
CEILINGS = Ceilings(
    products={"bfloat16": 800e12, "float32": 50e12},
    model_products={"bfloat16": 600e12},
    streams=[Stream(bytes=4 * MIB, rate=8e12), Stream(bytes=256 * MIB, rate=4e12)],
    attention=[
        AttentionRate(kernel="cudnn", dtype="bfloat16", width=64, rate=300e12),
        AttentionRate(kernel="cudnn", dtype="bfloat16", width=72, rate=250e12),
        AttentionRate(kernel="flash", dtype="bfloat16", width=72, rate=999e12),
    ],
    copies={"pinned to device": 50e9, "pinned to host": 40e9, "pageable to device": 5e9},
    launch_seconds=3e-6,
    host_rate=400e9,
    collective=Collective(ranks=8, seconds=2e-5, rate=300e9),
)


def row(recipe: str, measured: float, compute: float, **more: Any) -> MeasuredRow:
    """A row of one process that only computes, unless it is told otherwise."""
    given = {"processes": 1, "global_batch": 16, "communication": 0.0, "offload": 0.0, **more}
    return MeasuredRow(
        recipe=recipe, model="DiT-XL/2", step_seconds=measured, compute=compute, **given
    )


def rows(factor: float = 1.25, scatter: float = 0.0) -> list[MeasuredRow]:
    """Four that take ``factor`` times what the ceilings say, give or take ``scatter``."""
    names = ("single", "single+bf16", "single+checkpoint", "single+adam8bit")
    signs = (1, -1, 1, -1)
    return [
        row(name, (i + 1) * factor * (1 + scatter * sign), i + 1.0)
        for i, (name, sign) in enumerate(zip(names, signs, strict=True))
    ]


def made(device: Device = H200, **more: Any) -> Calibration:
    """A calibration of a card, of one day."""
    standing = StandingBytes(context=500 * MIB, libraries=70 * MIB, communication=200 * MIB)
    usual = {"measured": "2026-11-22", "ceilings": CEILINGS, "standing": standing, "rows": rows()}
    return Calibration(device=device, **{**usual, **more})
