"""Batch size of a suite: the micro batch with which plain float32 training should fit a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from harness.spec import Spec
from harness.subjects import subject_of
from strategies.subject import Shaping, Subject

HEADROOM = 0.85
"""Share of a device's memory to plan with; context, libraries and fragmentation take the rest."""
PAPER_BATCH = 256
"""Global batch of the DiT paper (section 4)."""
FULL_BATCH = 64
"""Samples per process at which a large GPU is busy; larger batches only make a suite longer."""
LEAST = 4
"""Least samples per process; four accumulation steps divide it."""


TOKEN = 80
"""Bytes that a block keeps for backward in float32, per token and unit of width. All layers outside
of the blocks together keep half as much as one block."""


def fitting_batch(settings: Mapping[str, Any], device_bytes: int, processes: int) -> int:
    """Return the samples per process with which plain float32 data-parallel training should fit.

    ``settings`` are fields of a spec. The result is a power of two from ``LEAST`` to ``most``. On a
    device that is too small for ``LEAST``, only the rows that save memory run.
    """
    from harness.data.feed import check_data

    known = {name: settings.get(name, getattr(Spec, name)) for name in ("model", "objective")}
    names = [f.name for f in dataclasses.fields(Shaping) if f.name != "data"]
    shaping = Shaping(**{name: settings[name] for name in names if name in settings})
    facts = check_data(settings.get("data", Spec.data))
    subject = subject_of(data=facts, shaping=shaping, **known)
    share, ema = LEAST, bool(settings.get("ema", Spec.ema))
    while 2 * share <= most(processes):
        if plain_bytes(subject, 2 * share, ema=ema) > HEADROOM * device_bytes:
            break
        share *= 2
    return share


def plain_bytes(subject: Subject, samples: int, *, ema: bool) -> int:
    """Return about the peak bytes of plain float32 data-parallel training with ``samples`` per
    process.

    Weights, two moments, DDP's buckets and the average are always allocated. Activations peak when
    backward begins and gradients when it ends, so the larger of the two counts. For a DiT from
    DiT-S/4 on, the result is within 2 % of the trace (``tests/predict/test_closed_form.py``).
    """
    weights, size = 4 * subject.sizes.total, subject.dimensions
    activations = samples * size.tokens * size.width * TOKEN * (size.depth + 0.5)
    return int((4 + ema) * weights + max(activations, weights))


def most(processes: int) -> int:
    """Return the largest number of samples per process of a suite."""
    return min(PAPER_BATCH // processes, FULL_BATCH)
