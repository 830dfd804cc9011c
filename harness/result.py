"""Results: the measurements of a run, in one typed and versioned JSON file, written atomically.

They hold raw numbers in base units (seconds, bytes). Imports no torch: any machine can report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness.json_files import BadFile, read_json, write_json
from harness.spec import Spec

SCHEMA = 1


class Status(StrEnum):
    """End of a planned run."""

    OK = "ok"
    GPU_OOM = "gpu_oom"
    HOST_OOM = "host_oom"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"
    VOID = "void"
    INTERRUPTED = "interrupted"
    NODE_LOST = "node_lost"


UNPLACED = "unknown: "
"""Beginning of ``Categories.placed_by`` if a CPU's tensors could not be told apart."""


def is_unplaced(placed_by: str | None) -> bool:
    """Return whether the placement of a row's tensors is unknown, by its ``placed_by``."""
    return (placed_by or "").startswith(UNPLACED)


class BadResult(ValueError):
    """A file is not a result of this schema; the message names the file and the error."""


@dataclass(kw_only=True)
class Check:
    """One check of the audit: the requested and the observed value."""

    name: str
    asked: Any
    found: Any
    ok: bool


@dataclass(kw_only=True)
class Peak:
    """Peak bytes of one of ``harness.phases.PEAK_PHASES`` on one rank, each of its own instant.

    - ``allocated``: live tensors (GPU: the caching allocator's max_memory_allocated; no GPU: the
    resident high-water mark above the baseline).
    - ``reserved``: of the caching allocator; None without a GPU.
    - ``process``: on a GPU, bytes that the device counts as used (cudaMemGetInfo) minus those used
    before the run, sampled while the phase runs if its steps are not timed, and at its end. Without
    a GPU, the resident high-water mark of the process.
    """

    ENDED = ("active",)

    allocated: int
    reserved: int | None = None
    process: int | None = None


@dataclass(kw_only=True)
class Categories:
    """Bytes of the tensors that were alive at the traced peak instant of one step.

    ``workspace`` is every tensor without another category: temporaries, communication buckets,
    kernel scratch. ``phase`` and ``where`` give the time and the op of the peak. ``beyond_state``
    is the largest sum of activations and workspace at any instant. ``resident`` counts models
    beside the trained one, in runs of a user's script.

    On a CPU the counts are of the tensors that the engine keeps on the device. ``host`` counts
    those in host memory, at their own peak (None: none), and ``everywhere`` is the largest sum of
    both. ``placed_by`` is the source of the placement; older results count both together.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    ema: int
    activations: int
    workspace: int
    phase: str
    where: str
    beyond_state: int | None = None
    host: Categories | None = None
    placed_by: str = ""
    everywhere: int | None = None
    resident: int = 0

    @property
    def total(self) -> int:
        state = self.parameters + self.gradients + self.optimizer_state + self.ema
        return state + self.activations + self.workspace + self.resident


@dataclass(kw_only=True)
class StepUsage:
    """Kernel counts of each timed step (getrusage of one process with all its threads).

    ``busy_seconds`` are core-seconds in which the ``cores`` that it may use ran any process
    (/proc/stat), in ticks of about 10 ms; 0 if the kernel does not report them.
    """

    ENDED = ("voluntary_switches",)

    cpu_seconds: list[float]
    forced_switches: list[int]
    minor_faults: list[int]
    busy_seconds: list[float]
    cores: int


@dataclass(kw_only=True)
class Rank:
    """Measurements of one process.

    ``phases`` are peaks by ``harness.phases.PEAK_PHASES``; ``phase_seconds`` those of the
    ``RUN_PHASES`` that had ended.
    ``nvme_bytes`` is the size of its swap files at the end. ``step_usage`` has an entry for each of
    ``step_seconds``. ``resident``: class of each model beside the trained one -> bytes.
    """

    ENDED = ("host_peak_bytes", "pinned_bytes")

    rank: int
    device: str
    baseline_bytes: int
    phases: dict[str, Peak]
    categories: Categories | None
    nvme_bytes: int
    warmup_seconds: list[float]
    step_seconds: list[float]
    phase_seconds: dict[str, float]
    host_categories: Categories | None = None
    step_usage: StepUsage | None = None
    resident: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Projections:
    """Effect of the optimizer: a few signed sums of each block of trained parameters
    (``harness.worker.projections``), as block -> sums; in older results, parameter name -> sums.

    ``update``: of the parameter's change over the compared steps. ``moment``: of the optimizer's
    first moment after them, which is linear in the gradients. ``average``: of the change of the
    weight average. ``inputs``: of the first step's inputs other than the samples, by name. A kind
    that the run does not keep is empty.
    """

    update: dict[str, list[float]] = field(default_factory=dict)
    moment: dict[str, list[float]] = field(default_factory=dict)
    average: dict[str, list[float]] = field(default_factory=dict)
    inputs: dict[str, list[float]] = field(default_factory=dict)


def by_block(sums: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the signed sums of each block: those of its parameters, added.

    A block is the name up to its first number (``blocks.3``), else the module of the parameter.
    """
    if not any(re.search(r"(^|\.)\d+\.", name) for name in sums):  # of blocks already
        return {name: list(values) for name, values in sums.items()}
    found: dict[str, list[float]] = {}
    for name, values in sums.items():
        key = _block(name)
        before = found.get(key, [0.0] * len(values))
        found[key] = [a + b for a, b in zip(before, values, strict=True)]
    return found


@functools.lru_cache(maxsize=1 << 14)
def _block(name: str) -> str:
    words = name.split(".")
    numbers = [place for place, word in enumerate(words) if word.isdigit()]
    return ".".join(words[: numbers[0] + 1] if numbers else words[:-1] or words)


@dataclass(kw_only=True)
class GpuSample:
    """State of a GPU of the run at one moment, read by nvidia-smi; 0 for a missing number.

    ``when`` is "before" or "after" the timed steps. ``held_back_by`` names the reasons for a
    lowered clock other than the user's settings. ``processes`` counts compute processes.
    """

    ENDED = ("max_sm_clock_hz", "celsius")

    when: str
    index: int
    uuid: str
    sm_clock_hz: int
    held_back_by: list[str]
    processes: int


@dataclass(kw_only=True)
class LaunchRecord:
    """Observations of the launching process; ``others`` are other Headrooms' processes."""

    ENDED = ("tree_processes", "port")

    exit_code: int | None
    wall_seconds: float
    tree_peak_bytes: int | None
    killed: bool = False
    others: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class Drawn:
    """Samples of a run, recorded to measure their distance to those of another run.

    ``latents`` holds the first of a batch's ``samples``: float32, little-endian, in base64, of
    ``shape`` [B, C, H, W]. ``labels`` covers all of them; ``noise`` is a hash of their initial
    noise. A sample took ``evaluations`` of the guided model, each of ``products`` linear layers.
    """

    ENDED = ("echo", "taken_for", "latency_seconds")

    samples: int
    evaluations: int
    products: int
    shape: list[int]
    latents: str
    labels: list[int]
    noise: str


@dataclass(kw_only=True)
class Result:
    """End and measurements of one planned run.

    - ``losses``, ``grad_norms``: one global mean per step, in order (``harness.phases``).
    - ``projections``: cover all steps up to the last timed one; None for a training or a trial.
    - ``evidence``: strategy name -> facts read back.
    - ``configs``: the launch file and, under DeepSpeed, the JSON as the engine used it.
    - ``meter``: "cuda" (the caching allocator) or "resident" (no GPU).
    - ``parity``: "exact" or "by design".
    - ``phase``, ``step``: end of the run, as one of ``harness.phases.RUN_PHASES`` and a step in it.
    - ``recordings``: files of the profiler or of the allocator's history in the run's folder.
    - ``flops_per_step``: 0 if not counted.
    - ``inputs``: digest of each file of the user's that his model or script opened; None if nothing
    of his ran, or if it is unknown.
    - ``drawn``: samples of a sampling run, whose steps are batches of samples.
    """

    status: Status
    spec: Spec
    ENDED = ("nodes", "wire", "token", "beside", "key_averages")
    """Fields of older results."""

    schema: int = SCHEMA
    reason: str | None = None
    way_out: str | None = None
    parity: str = "exact"
    phase: str | None = None
    step: int | None = None
    peak_so_far_bytes: int | None = None
    command: str = ""
    identity: str = ""
    inputs: dict[str, str] | None = None
    started: str = ""
    meter: str = "resident"
    meter_notes: list[str] = field(default_factory=list)
    flops_per_step: float = 0.0
    parameters: int = 0
    micro_batch: int = 0
    accumulation: int = 1
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    projections: Projections | None = None
    ranks: list[Rank] = field(default_factory=list)
    audit: list[Check] = field(default_factory=list)
    evidence: dict[str, dict[str, Any]] = field(default_factory=dict)
    configs: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    launch: LaunchRecord | None = None
    log_tail: str = ""
    recordings: list[str] = field(default_factory=list)
    gpu_samples: list[GpuSample] = field(default_factory=list)
    drawn: Drawn | None = None

    @classmethod
    def not_run(
        cls, resolved: Any, status: Status, reason: str | None, way_out: str | None, **more: Any
    ) -> Result:
        """Return the row of a run without a worker's result; ``resolved`` is a ``Resolved``."""
        return cls(
            status=status,
            spec=resolved.spec,
            reason=reason,
            way_out=way_out,
            parity=resolved.recipe.parity,
            meter="cuda" if resolved.spec.device == "cuda" else "resident",
            parameters=resolved.subject.parameters,
            micro_batch=resolved.micro_batch,
            accumulation=resolved.recipe.accumulation,
            **more,
        )

    def write(self, path: Path) -> None:
        """Write atomically: a reader sees the old file or the new one, never a part."""
        write_json(path, dataclasses.asdict(self))


def load(path: Path) -> Result:
    """Read one result; a BadResult names the file and its fault."""
    try:
        found = read_json(path, Result, name="result", schema=SCHEMA)
    except BadFile as error:
        raise BadResult(str(error)) from None
    # The ranks that one process simulated, in an older result; 0 for a real run.
    head = path.read_text(encoding="utf-8", errors="replace")[:4096]
    if re.search(r'"world": [1-9]', head):
        raise BadResult(f"{path}: rank 0 of a simulated world, which no report compares any more")
    return found


def found(folder: Path) -> Result | None:
    """Return the readable ``result.json`` of a run's folder; None if there is none."""
    with contextlib.suppress(BadResult):
        return load(folder / "result.json")
    return None


def load_all(folder: Path) -> tuple[list[Result], list[str]]:
    """Return all results in ``folder`` and ``folder/runs/*``, and a line for each file skipped."""
    results, skipped = [], []
    for path in [*folder.glob("result.json"), *sorted(folder.glob("runs/*/result.json"))]:
        try:
            results.append(load(path))
        except BadResult as error:
            skipped.append(str(error))
    return results, skipped
