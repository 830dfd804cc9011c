"""Uncertainty of predicted memory and time, from public rows measured on GPUs. Without torch.
``residuals.json`` has an entry for each figure of a public row (``docs/public-rows.yaml``). Ranges
follow from them with sources as units: rows of one trainer or author share their error. ``python -m
docs.make.coverage`` prints how many figures lie in the range that all other sources give."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
    """Memory of a public row: its class, its source, and measured over predicted, less one."""

    kind: str
    source: str
    error: float


class Timed(NamedTuple):
    """Step time of a public row: its source, the family of its card, measured over predicted."""

    source: str
    family: str
    ratio: float


class Reach(NamedTuple):
    """Range of a time: from ``low`` to ``high`` times the prediction, by so many ``sources``."""

    low: float
    high: float
    sources: int


@dataclass(frozen=True)
class Share:
    """Uncertainty of the class ``kind``: plus or minus ``share`` of the prediction.
    ``rows`` and ``sources`` count the class's own. ``pooled``: they are too few, so the rows of all
    classes count."""

    kind: str
    share: float
    rows: int
    sources: int
    pooled: bool


def class_of(traits: Iterable[str], found: Prediction) -> str:
    """Return the class of a prediction, a key of ``CLASSES``.
    The launch's ``traits`` name what an engine or a strategy offloads. An optimizer that keeps its
    own state in host memory has no such trait: the prediction shows it."""
    traits, steady = frozenset(traits), (found.host_steady, found.steady)
    # torch's AdamW keeps its step counts on the host, which are far less than its moments.
    host, device = (one.categories.get("optimizer_state", 0) if one else 0 for one in steady)
    if traits & HOSTED or host > device:
        return "offloaded"
    if traits & {"shards", "split_parameters", "stages"}:
        return "sharded"
    if "compiled" in traits:
        return "compiled"
    return "set-up" if found.peak and found.peak.phase in SETUP_PEAKS else "one GPU"


@functools.cache
def _known() -> dict[str, list[list[Any]]]:
    return json.loads(FILE.read_text(encoding="utf-8"))


@functools.cache
def rows() -> tuple[Residual, ...]:
    """Return the memory of the public rows in ``residuals.json``."""
    return tuple(Residual(*one) for one in _known()["memory"])


@functools.cache
def times() -> tuple[Timed, ...]:
    """Return the step times of the public rows in ``residuals.json``."""
    return tuple(Timed(*one) for one in _known()["time"])


@functools.cache
def shares() -> dict[str, Share]:
    """Return the uncertainty of each class, from all rows."""
    return {kind: share_of(kind, rows()) for kind in CLASSES}


@functools.cache
def reach() -> Reach:
    """Return the range of a step's time without calibration, from all rows."""
    return reach_of(times())


def share_of(kind: str, known: Sequence[Residual]) -> Share:
    """Return the uncertainty of a class, from the ``known`` rows alone.

    It is a split conformal interval (Vovk et al. 2005; Lei et al. 2018, arXiv:1604.04173). Its
    units are sources; a source's score is its worst row. Of n scores, the
    ``ceil((n + 1) * COVERAGE)``-th smallest covers an unseen source with probability ``COVERAGE``.
    A class of fewer than nine sources takes the range of all classes, or its own worst row if that
    is larger. Fewer than nine sources in all give their worst row, which promises less.

    Raises:
        ValueError: there are no rows.
    """
    own = _worst(one for one in known if one.kind == kind)
    rank = _rank(len(own))
    pooled = rank > len(own)
    scores = _worst(known)
    every = scores[min(_rank(len(scores)), len(scores)) - 1]
    share = max([every, *own]) if pooled else own[rank - 1]
    count = sum(one.kind == kind for one in known)
    return Share(kind=kind, share=share, rows=count, sources=len(own), pooled=pooled)


def _rank(count: int) -> int:
    """Return which of ``count`` ordered scores bounds one more with probability ``COVERAGE``."""
    return math.ceil((count + 1) * COVERAGE)


def _worst(known: Iterable[Residual]) -> list[float]:
    """Return the largest error of each source, in ascending order."""
    found: dict[str, float] = {}
    for one in known:
        found[one.source] = max(found.get(one.source, 0.0), abs(one.error))
    return sorted(found.values())


def reach_of(known: Sequence[Timed]) -> Reach:
    """Return the range of a time, from the ``known`` rows alone.

    Each source counts once, and its rows share it equally: an end is where the mean conformal
    p-value of one row drawn from each source falls below ``1 - COVERAGE`` (Dunn et al. 2018,
    arXiv:1809.07441, repeated subsampling). Fewer than ten sources give their extreme rows.
    The lower end holds alone with that probability, and so does the upper.

    Raises:
        ValueError: there are no rows.
    """
    counts = Counter(one.source for one in known)
    weights = [(one.ratio, 1 / counts[one.source]) for one in known]
    beyond = (1 - COVERAGE) * (len(counts) + 1) - 1
    return Reach(_end(sorted(weights), beyond), _end(sorted(weights)[::-1], beyond), len(counts))


def _end(ordered: Sequence[tuple[float, float]], beyond: float) -> float:
    """Return the first of ordered (value, weight) that leaves at most ``beyond`` weight before
    it."""
    before, found = 0.0, ordered[0][0]
    for value, weight in ordered:
        if before > beyond + 1e-9:
            break
        before, found = before + weight, value
    return found
