"""What is predicted for one recipe: plain data, kept as JSON. No torch.

A prediction for a GPU depends on which GPU by its kind alone, the attention kernels that it has
(``attention``): what a card adds (workspaces, context) and how long it takes follow from
``harness.planner.overhead`` and ``roofline``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.json_files import BadFile, build, read_json, write_json
from harness.memory.record import Instant
from harness.planner.speed.roofline import Work
from harness.resolve import Resolved

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Aside:
    """Text encoders and a VAE on a GPU, in bytes: their ``weights``, and beyond these what the
    forward pass ``what`` has ``allocated`` at its fullest and ``reserved`` in an empty pool."""

    weights: int
    allocated: int
    reserved: int
    what: str


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Bytes of one rank, ``rank``: the fullest, where ranks hold other things than each other;
    ``steady_of_ranks`` has the peak of a later step of each of those.

    ``method``: "trace" (the real step, on tensors without storage) or "none", for ``reason``, where
    ``fault`` is what a library raised or printed.
    ``peak`` is of the whole training, set-up included, ``steady`` of a later step, ``first_step``
    the bytes of the first, which begins without optimizer state; ``phases`` has the peak of each.
    ``host`` (of the whole training) and ``host_steady`` are of host memory, for a GPU; ``nvme`` is
    what is swapped, ``between`` what lives on the device between two steps.
    ``beyond_state`` is the most that a later step held on the device at once beyond parameters,
    gradients, optimizer state and average, ``beyond`` the same of each phase.
    ``allocated`` and ``reserved`` are what CUDA's allocator would say, ``least`` is the smallest
    limit under which the same allocations still succeed; None without a GPU. ``attention`` names
    the kernels of torch's attention that ran in a trace, ``buckets`` the category in which a
    measured step counts the engine's communication buckets.
    ``asides``: of a phase beside the step (``harness.phases.PLANNED``) its encoders and VAE;
    ``denoising``: the bytes of the fullest instant of a forward pass without gradients.
    """

    recipe: str
    device: str
    method: str
    buckets: str = "workspace"
    reason: str = ""
    fault: str = ""
    peak: Instant | None = None
    steady: Instant | None = None
    first_step: int | None = None
    host: Instant | None = None
    host_steady: Instant | None = None
    beyond_state: int | None = None
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
    seconds_taken: float = 0.0
    schema: int = SCHEMA

    @property
    def bytes(self) -> int | None:
        """The predicted peak of live tensors on the device: allocated, where that is known."""
        if self.allocated is not None:
            return self.allocated
        return self.peak.bytes if self.peak else None

    def write(self, path: Path) -> None:
        """Write atomically."""
        write_json(path, dataclasses.asdict(self), durable=False)


def none(resolved: Resolved, reason: str, fault: str = "") -> Prediction:
    """No prediction: ``reason`` is for a person, ``fault`` what was raised or printed."""
    return Prediction(
        recipe=str(resolved.recipe),
        device=resolved.spec.device,
        method="none",
        reason=reason,
        fault=fault,
    )


def load(path: Path) -> Prediction:
    """Read one prediction.

    Raises:
        BadFile: unreadable, of another schema, or a field of the wrong type; names the file.
    """
    data = read_json(path, name="prediction", schema=SCHEMA)
    try:
        return read(data)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadFile(f"{path}: {error}") from None


def kept(path: Path) -> Prediction | None:
    """Return the prediction in a cache, or None if there is none that can be used."""
    with contextlib.suppress(BadFile):
        return load(path)
    return None


def read(data: dict[str, Any]) -> Prediction:
    """Return the prediction that was written as ``data``, checked."""
    # Files of earlier versions have a closed form beside the trace, which nothing reads, and lack
    # the engine's word for its buckets; then there were only the engines of DeepSpeed and DDP.
    data.pop("closed_form", None)
    data.setdefault("buckets", "gradients" if data["recipe"].startswith("zero") else "workspace")
    return build(Prediction, data, "prediction")
