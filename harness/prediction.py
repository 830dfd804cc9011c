"""Records of predictions as data: ``prediction.json`` beside a result. Does not import torch."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from harness.json_files import BadFile, build, read_json, write_json
from harness.memory.record import Instant

FILE = "prediction.json"
"""File of the prediction in a run's folder."""
SCHEMA = 1
"""Schema of the file."""
BEYOND = 10**40
"""Bound above the FLOPs of a step: they grow with the square of the tokens, beyond 64 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """``count`` equal ops of one ``kind`` and optimizer step.

    - product, attention, memory: kernels.
    - collective: ``bytes`` on the wire for many ranks; overlapped: hidden behind computation.
    - transfer: a copy from device to host or back; streamed: hidden behind computation.
    - host, nvme: bytes of host memory or of files.
    - chain: a rank waits (``group`` - 1) / ``count`` of its computation, in a pipeline.

    A collective is among ``group`` ranks that are ``stride`` apart; 0: among all.
    """

    phase: str
    kind: str
    dtype: str
    flops: int
    bytes: int
    count: int
    group: int = 0
    stride: int = 1


class Sent(NamedTuple):
    """Bytes that a rank sends in a step within its node and across nodes, by rings."""

    within: int
    across: int


@dataclass(frozen=True, kw_only=True)
class Aside:
    """Bytes of text encoders and a VAE on a GPU: ``weights``, and beyond these the peaks of the
    forward pass ``what`` in an empty pool. ``work``: of all passes of one micro-batch.
    """

    weights: int
    allocated: int
    reserved: int
    what: str
    work: list[Work] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Memory and work of one rank: of that with the highest peak, ``rank``.

    ``method`` is "trace" (the real step on tensors without storage) or "none", with a ``reason``;
    ``fault`` is the message that a library raised or printed. Peaks, in bytes of live tensors:

    - ``peak``: of the whole training, set-up included; ``phases``: of each phase.
    - ``steady``: of a later step; ``steady_of_ranks``: the same of each distinct rank.
    - ``host`` and ``host_steady``: host memory beside a GPU, of the training and of a later step.
    - ``beyond``: of each phase of a later step, without parameters, gradients, optimizer state and
      average.
    - ``between``: on the device between two steps. ``nvme``: swapped to files.
    - ``denoising``: of a forward pass without gradients.

    ``allocated`` and ``reserved`` are the peaks of CUDA's caching allocator; ``least`` is the
    smallest limit under which its allocations still succeed. ``buckets`` is the category in which a
    measured step counts communication buckets. ``recorded``: the day, if it ships with the project.
    """

    ENDED: ClassVar = ("first_step", "beyond_state", "seconds_taken")
    """Fields of older predictions."""

    recipe: str
    device: str
    method: str
    buckets: str = "workspace"
    reason: str = ""
    fault: str = ""
    peak: Instant | None = None
    steady: Instant | None = None
    host: Instant | None = None
    host_steady: Instant | None = None
    beyond: dict[str, int] = field(default_factory=dict)
    phases: dict[str, int] = field(default_factory=dict)
    nvme: int = 0
    between: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    reserved_expandable: int | None = None
    least: int | None = None
    work: list[Work] = field(default_factory=list)
    attention: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rank: int = 0
    steady_of_ranks: dict[str, int] = field(default_factory=dict)
    asides: dict[str, Aside] = field(default_factory=dict)
    denoising: int | None = None
    recorded: str = ""
    schema: int = SCHEMA

    @property
    def bytes(self) -> int | None:
        """Predicted peak of live tensors on the device: ``allocated`` if known, else ``peak``."""
        if self.allocated is not None:
            return self.allocated
        return self.peak.bytes if self.peak else None

    def write(self, path: Path) -> None:
        write_json(path, dataclasses.asdict(self), durable=False)


def load(path: Path) -> Prediction:
    """Read the prediction in ``path``; a BadFile names the file and its fault."""
    return read_json(path, Prediction, name="prediction", schema=SCHEMA, beyond=BEYOND)


def kept(path: Path) -> Prediction | None:
    """Return the cached prediction in ``path``, or None if no readable one exists."""
    with contextlib.suppress(BadFile):
        return load(path)
    return None


def read(data: dict[str, Any]) -> Prediction:
    return build(Prediction, data, "prediction")


def read_predictions(folder: Path, skipped: list[str]) -> dict[str, Prediction]:
    """Return spec key -> prediction of every run folder; ``skipped`` collects bad files."""
    predictions = {}
    for path in sorted(Path(folder).glob(f"runs/*/{FILE}")):
        try:
            predictions[path.parent.name.rpartition("-")[2]] = load(path)
        except BadFile as error:
            skipped.append(str(error))
    return predictions
