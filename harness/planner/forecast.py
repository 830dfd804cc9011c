"""Predictions of a suite's rows for one card, stored beside the results. Does not import torch.

The file has raw figures only. The report derives savings and verdicts from it and predicts nothing
itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.json_files import read_json, write_json
from harness.planner.speed.cards import NODE
from harness.planner.speed.roofline import Work, sent
from harness.planner.verdict import Fit, at_the_ends
from harness.spec import Spec

FILE = "forecast.json"
"""Name of the file in a folder of results."""
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Foretold:
    """Prediction for one row. Bytes are of one GPU, seconds of one optimizer step.

    ``verdict`` is a word of ``harness.planner.verdict.Fit``; ``reason`` says why there is no
    prediction. ``peak_bytes`` are the live tensors at the fullest instant of a later step, and
    ``categories`` splits them (``harness.memory.record.CATEGORIES``). ``buckets`` is the category
    in which the engine's communication buckets count. ``beyond_state_bytes``: the most that such a
    step held beyond its state. ``spread_seconds``: plus or minus. ``block_forwards``: forward runs
    of a block per step, or None if the trace does not show it.

    Rows on many GPUs have more fields. ``asked``: the requested recipe, which ``spec`` adapts to
    that many GPUs. ``exposed_seconds``: communication that nothing hides. ``within_bytes`` and
    ``across_bytes``: bytes that a rank sends within its node and across nodes.
    ``slow_links_seconds`` and ``slow_card_seconds``: seconds of a step at two ends of the
    uncertainty (``verdict.at_the_ends``).
    """

    spec: Spec
    verdict: str
    reason: str = ""
    need_bytes: int | None = None
    peak_bytes: int | None = None
    peak_phase: str = ""
    categories: Mapping[str, int] = field(default_factory=dict)
    buckets: str = "workspace"
    beyond_state_bytes: int | None = None
    step_seconds: float | None = None
    spread_seconds: float | None = None
    block_forwards: float | None = None
    asked: str = ""
    exposed_seconds: float | None = None
    within_bytes: int | None = None
    across_bytes: int | None = None
    slow_links_seconds: float | None = None
    slow_card_seconds: float | None = None

    @property
    def fits(self) -> bool:
        """True if the row would train on the card and all its figures are known."""
        known = (self.peak_bytes, self.beyond_state_bytes, self.step_seconds)
        return self.verdict in ("fits", "tight") and None not in known


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Rows of the suite ``suite`` for the model ``model`` on the card ``gpu``.

    ``gpu_bytes``: memory of one card. ``node``: cards per machine. ``assumed``: the assumptions
    about the card. ``made_with``: versions, and the hash of the predicting sources.
    """

    suite: str
    model: str
    gpu: str
    gpu_bytes: int
    assumed: str
    made_with: Mapping[str, str]
    rows: Sequence[Foretold]
    schema: int = SCHEMA
    node: int = NODE

    def write(self, folder: Path) -> Path:
        """Write ``folder/forecast.json`` atomically."""
        path = Path(folder) / FILE
        write_json(path, as_data(self))
        return path


def as_data(found: Forecast) -> dict[str, Any]:
    """Return a forecast as plain data, as it is written."""
    return dataclasses.asdict(found)


def read(folder: Path) -> Forecast | None:
    """Return the forecast in a folder of results, or None if the folder has none.

    Raises:
        BadFile: unreadable, of another schema, or a field of the wrong type; names the file.
    """
    path = Path(folder) / FILE
    return read_json(path, Forecast, name="forecast", schema=SCHEMA) if path.exists() else None


def foretold(fit: Fit, asked: str = "") -> Foretold:
    """Return the record of a prediction that was judged against a card."""
    found, steady = fit.prediction, fit.prediction.steady
    if steady is None or fit.seconds is None:
        told = {"verdict": fit.verdict, "reason": found.reason, "asked": asked}
        return Foretold(spec=fit.resolved.spec, **told)
    travels = sent(found.work, fit.resolved.spec.processes, fit.gpu.node)
    slow_links, slow_card = at_the_ends(fit)
    return Foretold(
        spec=fit.resolved.spec,
        verdict=fit.verdict,
        need_bytes=fit.need_bytes,
        peak_bytes=steady.bytes,
        peak_phase=steady.phase,
        categories=steady.categories,
        buckets=found.buckets,
        beyond_state_bytes=found.beyond_state,
        step_seconds=fit.seconds.total,
        spread_seconds=fit.seconds.spread,
        block_forwards=block_forwards(found.work),
        asked=asked,
        exposed_seconds=fit.seconds.communication,
        within_bytes=travels.within,
        across_bytes=travels.across,
        slow_links_seconds=slow_links,
        slow_card_seconds=slow_card,
    )


def block_forwards(work: Sequence[Work]) -> float | None:
    """Return how often a block's forward runs in one step, or None if it cannot be counted.

    Attention kernels are counted: each forward of a block runs one, and the backward kernels have
    other FLOPs. There is no count if plain matrix products compute the attention, or if blocks
    differ in it.
    """
    kernels = [w for w in work if w.kind == "attention"]
    first = {w.flops for w in kernels if w.phase == "forward"}
    if len(first) != 1:
        return None
    ran = {phase: sum(w.count for w in kernels if w.phase == phase and w.flops in first)
           for phase in ("forward", "backward")}  # fmt: skip
    return 1 + ran["backward"] / ran["forward"]
