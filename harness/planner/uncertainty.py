"""Uncertainty of predicted memory, from public rows measured on GPUs. Does not import torch.

``residuals.json`` has one entry per public row (``docs/public-rows.yaml``). ``share_of`` computes
a class's range from them.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness.phases import SETUP_PEAKS
from harness.prediction import Prediction

FILE = Path(__file__).with_name("residuals.json")
COVERAGE = 0.9
HOSTED = frozenset({"host_weights", "host_optimizer", "streams_weights", "moves_activations"})
CLASSES = {
    "offloaded": "weights, optimizer state or activations in host memory",
    "sharded": "each rank holds a share",
    "compiled": "the blocks run as compiled graphs",
    "set-up": "one GPU, and its set-up needs more than a step",
    "one GPU": "one GPU or replicas, and a step needs the most",
    "beside the step": "loading, encoding or validation needs the most",
}
"""Class of a prediction -> description of its rows. ``class_of`` returns the first that applies."""
UNMEASURED = {
    "beside the step": "its ten public measurements are too few (docs/explanation/accuracy.md)",
    "compiled": "its two public measurements are of whole runs, and two rows were checked on GPUs",
}
"""Class without rows in ``residuals.json`` -> its other measurements."""


class Residual(NamedTuple):
    """One public row: its class, its model, and measured over predicted memory, less one."""

    kind: str
    model: str
    error: float


@dataclass(frozen=True)
class Share:
    """Uncertainty of the class ``kind``: plus or minus ``share`` of the prediction.

    ``rows`` and ``models`` count the class's own. ``pooled``: they are too few, so the rows of all
    classes count.
    """

    kind: str
    share: float
    rows: int
    models: int
    pooled: bool


def class_of(traits: Iterable[str], found: Prediction) -> str:
    """Return the class of a prediction, a key of ``CLASSES``.

    The launch's ``traits`` name what an engine or a strategy offloads. An optimizer that keeps its
    own state in host memory has no such trait: the prediction shows it.
    """
    traits = frozenset(traits)
    if traits & HOSTED or _hosts_optimizer(found):
        return "offloaded"
    if traits & {"shards", "split_parameters", "stages"}:
        return "sharded"
    if "compiled" in traits:
        return "compiled"
    return "set-up" if found.peak and found.peak.phase in SETUP_PEAKS else "one GPU"


def _hosts_optimizer(found: Prediction) -> bool:
    """Return True if host memory has more optimizer state than the device.

    torch's AdamW keeps its step counts on the host, which are far less than its moments.
    """
    host, device = (
        one.categories.get("optimizer_state", 0) if one else 0
        for one in (found.host_steady, found.steady)
    )
    return host > device


@functools.cache
def rows() -> tuple[Residual, ...]:
    """Return the residuals of the public rows in ``residuals.json``."""
    return tuple(Residual(*one) for one in json.loads(FILE.read_text(encoding="utf-8")))


@functools.cache
def shares() -> dict[str, Share]:
    """Return the uncertainty of each class, from all rows."""
    return {kind: share_of(kind, rows()) for kind in CLASSES}


def share_of(kind: str, known: Sequence[Residual]) -> Share:
    """Return the uncertainty of a class, from the ``known`` rows alone.

    It is a split conformal interval (Vovk et al. 2005; Lei et al. 2018, arXiv:1604.04173). Its
    units are models, because rows of one model share their error; a model's score is its worst row.
    Of n scores, the ``ceil((n + 1) * COVERAGE)``-th smallest covers an unseen model with
    probability ``COVERAGE``. A class of fewer than nine models takes the larger of the pooled range
    of all classes and its own worst row.

    Raises:
        ValueError: there are no rows.
    """
    own = _worst(one for one in known if one.kind == kind)
    rank = _rank(len(own))
    pooled = rank > len(own)
    if pooled:
        scores = _worst(known)
        share = max([scores[min(_rank(len(scores)), len(scores)) - 1], *own])
    else:
        share = own[rank - 1]
    count = sum(one.kind == kind for one in known)
    return Share(kind=kind, share=share, rows=count, models=len(own), pooled=pooled)


def _rank(count: int) -> int:
    """Return which of ``count`` ordered scores bounds one more with probability ``COVERAGE``."""
    return math.ceil((count + 1) * COVERAGE)


def _worst(known: Iterable[Residual]) -> list[float]:
    """Return the largest error of each model, in ascending order."""
    found: dict[str, float] = {}
    for one in known:
        found[one.model] = max(found.get(one.model, 0.0), abs(one.error))
    return sorted(found.values())
