"""The batch of a suite: what plain float32 training fits on a GPU, by a rule of thumb."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from harness.data.feed import check_data
from harness.spec import Spec
from harness.subjects import subject_of
from strategies.subject import Shaping, Subject

HEADROOM = 0.85
"""Share of a device's memory to plan with: context, libraries and fragments take the rest."""
PAPER_BATCH = 256
"""Global batch of the DiT paper (section 4)."""
FULL_BATCH = 64
"""Samples at which a large GPU is busy; more would only make a suite longer."""
LEAST = 4
"""Samples that four accumulation steps divide."""


TOKEN = 80
"""Bytes that a block keeps for backward in float32, a token and unit of width; half as many are
kept outside of the blocks."""


def fitting_batch(settings: Mapping[str, Any], device_bytes: int, processes: int) -> int:
    """Samples a process for a suite of ``settings`` (fields of a spec): plain float32
    data-parallel training should fit with them.

    The largest power of two from ``LEAST`` to ``most``. On a device too small even for ``LEAST``,
    the rows that save memory are the ones that run.
    """
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
    """About what plain float32 data-parallel training keeps of ``samples`` a process at its peak.

    Weights, two moments, DDP's buckets and the average stand all the time. Activations are there
    when backward begins and gradients when it ends, so the larger of the two counts. Of a DiT it
    is within 2 % of the trace from DiT-S/4 on (``tests/predict/test_closed_form.py``).
    """
    weights, size = 4 * subject.sizes.total, subject.dimensions
    activations = samples * size.tokens * size.width * TOKEN * (size.depth + 0.5)
    return int((4 + ema) * weights + max(activations, weights))


def most(processes: int) -> int:
    """Samples a process beyond which no suite goes."""
    return min(PAPER_BATCH // processes, FULL_BATCH)
