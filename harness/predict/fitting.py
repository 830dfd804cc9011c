"""The batch of a suite: what plain float32 training fits on a GPU, by the closed form. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from harness.data import check_data
from harness.predict import closed_form
from harness.resolve import resolve
from harness.spec import Spec

__all__ = ["HEADROOM", "LEAST", "fitting_batch", "most", "plain"]

HEADROOM = 0.85
"""Share of a device's memory to plan with: context, libraries and fragments take the rest."""
PAPER_BATCH = 256
"""Global batch of the DiT paper (section 4)."""
FULL_BATCH = 64
"""Samples at which a large GPU is busy; more would only make a suite longer."""
LEAST = 4
"""Samples that four accumulation steps divide."""


def fitting_batch(settings: Mapping[str, Any], device_bytes: int, processes: int) -> int:
    """Samples a process for a suite of ``settings`` (fields of a spec): plain float32
    data-parallel training should fit with them.

    The largest power of two from ``LEAST`` to ``most``. On a device too small even for ``LEAST``,
    the rows that save memory are the ones that run.
    """
    share = LEAST
    while 2 * share <= most(processes):
        need = closed_form.peak_bytes(resolve(plain(settings, processes, 2 * share)))
        if need is None or need > HEADROOM * device_bytes:
            break
        share *= 2
    return share


def most(processes: int) -> int:
    """Samples a process beyond which no suite goes."""
    return min(PAPER_BATCH // processes, FULL_BATCH)


def plain(settings: Mapping[str, Any], processes: int, share: int) -> Spec:
    """Plain float32 data-parallel training of the model of ``settings``.

    Its data are synthetic latents of the same size: an encoder in the loop counts as context.
    """
    known = {k: settings[k] for k in ("model", "objective", "ema") if k in settings}
    side = check_data(settings.get("data", Spec.data)).input_size
    batch = share * processes
    spec = Spec(recipe="ddp", data=f"synthetic:{side}", device="cuda", global_batch=batch, **known)
    return dataclasses.replace(spec, processes=processes)
