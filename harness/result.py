"""Results: what was measured, one typed and versioned JSON file a run, written atomically.

Raw numbers only, in base units (seconds, bytes). Whatever can be derived from them is derived in
``harness.report``. Nothing here imports torch: a report can be made on any machine.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from harness.json_files import BadFile, read_json, write_json
from harness.spec import Spec

SCHEMA = 1
REHEARSED = "rehearsed"
"""Device of a row for which host memory took the place of a GPU. No reader takes such a row for a
measurement."""


class Status(str, Enum):
    """How a planned run ended."""

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


class BadResult(ValueError):
    """A file that is not a result of this schema; the message names the file and the fault."""


@dataclass(kw_only=True)
class Check:
    """One line of the audit: what was asked, what was read back."""

    name: str
    asked: Any
    found: Any
    ok: bool


@dataclass(kw_only=True)
class Peak:
    """Peak bytes of one of ``harness.phases.PEAK_PHASES`` on one rank: the maximum of each count,
    which need not be of one instant.

    ``allocated``: live tensors (GPU: the caching allocator's max_memory_allocated; no GPU: the
    resident high-water mark above the baseline). ``reserved`` and ``active`` are the caching
    allocator's and None without a GPU. ``process`` is, on a GPU, what the device counts as used
    (cudaMemGetInfo: context and libraries too, less what was used before the run), sampled while
    the phase runs where its steps are not timed, and at its end; and without one the plain resident
    high-water mark of the process.
    """

    allocated: int
    reserved: int | None = None
    active: int | None = None
    process: int | None = None


@dataclass(kw_only=True)
class Categories:
    """What was alive at the traced peak instant of one step, in bytes of tensors.

    ``workspace`` is everything not named: temporaries of backward and the optimizer,
    communication buckets, kernel scratch. ``phase`` (of the step) and ``where`` say when and at
    which op the peak was. ``beyond_state`` is the most that activations and workspace held
    together at any instant of the step: a peak late in backward is of gradients, and hides what
    was kept earlier.

    On a CPU these are the tensors that the engine keeps on the device, ``host`` those that it keeps
    in host memory at their own fullest instant (None: none), and ``placed_by`` says how that was
    known (``harness.memory.tracer``); empty in results that are older, where both are counted
    together. ``everywhere``: the most that lived at once, wherever it is kept.
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

    @property
    def total(self) -> int:
        """Bytes alive at the traced peak."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer_state
            + self.ema
            + self.activations
            + self.workspace
        )


@dataclass(kw_only=True)
class StepUsage:
    """What the kernel counted in each timed step, an entry a step.

    Of one process with all its threads (getrusage): CPU seconds (user and system), switches to
    another task that it asked for (it waited) and that were forced on it (another wanted its core),
    pages faulted in. ``busy_seconds`` are core-seconds in which the ``cores`` that it may use ran
    anybody's work (/proc/stat), in ticks of some 10 ms; 0 where the kernel does not tell.
    """

    cpu_seconds: list[float]
    voluntary_switches: list[int]
    forced_switches: list[int]
    minor_faults: list[int]
    busy_seconds: list[float]
    cores: int


@dataclass(kw_only=True)
class Rank:
    """What one process measured.

    ``phases`` are peaks by ``harness.phases.PEAK_PHASES``, ``phase_seconds`` the seconds of those
    of ``RUN_PHASES`` that had ended by then. ``host_peak_bytes`` is the process's resident
    high-water mark; ``nvme_bytes`` what it had swapped to files at the end. ``step_usage`` has an
    entry for each of ``step_seconds``; results older than that count have none.
    """

    rank: int
    device: str
    baseline_bytes: int
    phases: dict[str, Peak]
    categories: Categories | None
    host_peak_bytes: int
    pinned_bytes: int
    nvme_bytes: int
    warmup_seconds: list[float]
    step_seconds: list[float]
    phase_seconds: dict[str, float]
    host_categories: Categories | None = None
    step_usage: StepUsage | None = None


@dataclass(kw_only=True)
class Projections:
    """What the optimizer did, as a few signed sums of each trained parameter
    (``harness.worker.projections``): parameter's name -> the same number of sums each.

    ``update``: of what the compared steps changed in it. ``moment``: of the optimizer's first
    moment after them, which is linear in the gradients. ``average``: of the way that the average
    of the weights went. A kind that a run does not keep is empty. ``inputs``: of what the first
    step was given beside the samples, by name.
    """

    update: dict[str, list[float]] = field(default_factory=dict)
    moment: dict[str, list[float]] = field(default_factory=dict)
    average: dict[str, list[float]] = field(default_factory=dict)
    inputs: dict[str, list[float]] = field(default_factory=dict)


@dataclass(kw_only=True)
class GpuSample:
    """How a GPU of the run was at a moment, by nvidia-smi; numbers that it did not tell are 0.

    ``when`` is "before" or "after" the timed steps, with work on the device. ``held_back_by`` names
    what lowered its clock against the user's wish, ``processes`` counts those that compute on it.
    """

    when: str
    index: int
    uuid: str
    sm_clock_hz: int
    max_sm_clock_hz: int
    celsius: int
    held_back_by: list[str]
    processes: int


@dataclass(kw_only=True)
class LaunchRecord:
    """What the launching process saw. ``others``: processes of another Headroom that were at work
    on the machine meanwhile; of the rest nothing is needed to read the measurements."""

    exit_code: int | None
    wall_seconds: float
    tree_peak_bytes: int | None
    tree_processes: int | None = None
    killed: bool = False
    port: int | None = None
    others: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class NodeRecord:
    """One machine of a run on several, and how its part of the run ended.

    ``devices`` are its GPUs' names, ``driver`` their driver's; ``interface`` and ``address`` those
    by which it meets the others. ``stopped`` is why its supervisor ended its processes
    (``harness.cluster.supervisor``), None if they ended by themselves; ``answered`` is whether it
    wrote how it ended. ``tree_peak_bytes`` is resident memory, summed over its own processes.
    """

    rank: int
    host: str
    cores: int = 0
    memory_bytes: int = 0
    devices: list[str] = field(default_factory=list)
    driver: str = ""
    interface: str = ""
    address: str = ""
    answered: bool = True
    exit_code: int | None = None
    stopped: str | None = None
    tree_peak_bytes: int | None = None
    survivors: int = 0


@dataclass(kw_only=True)
class Wire:
    """The network between the nodes of a run, by all-reduces of one process a node before its rows
    (``harness.cluster.network``).

    ``latency_seconds``: of an all-reduce of 8 bytes, the median. ``bandwidth``: bytes a second that
    each node sent in one of ``size_bytes``, the fastest of a few. ``backend``: torch's.
    """

    backend: str
    latency_seconds: float
    bandwidth: float
    size_bytes: int


@dataclass(kw_only=True)
class Drawn:
    """What a run drew from noise, for its distance to what another drew.

    ``samples`` in a batch, of which ``latents`` holds the first: float32, little-endian, in base64,
    of ``shape`` [B, C, H, W]. ``labels`` are of all, and ``taken_for`` is the digit that a
    classifier takes each for; None but of digits. ``noise`` is a hash of what all were drawn from.
    ``evaluations`` of the guided model a sample took, each of ``products`` linear layers.
    ``latency_seconds``: of single samples drawn alone, without a warm-up of the clock.
    ``echo``: how far the same samples move, relative to their norm, where the noise is moved by the
    last bit of each float32: how much the sampler makes of a rounding.
    """

    samples: int
    evaluations: int
    products: int
    shape: list[int]
    latents: str
    labels: list[int]
    noise: str
    latency_seconds: list[float]
    echo: float
    taken_for: list[int] | None = None


@dataclass(kw_only=True)
class Result:
    """How one planned run ended, and what it measured. ``reason`` and ``way_out`` are sentences;
    the rest is raw.

    ``losses`` and ``grad_norms`` have one global mean for each step that the run took, in order:
    warm-up, memory, settling, timed, traced (``harness.phases``); ``projections`` are of all steps
    up to the last timed one, None where they were not taken (a training, a trial). ``evidence``
    maps a strategy's name to the facts read back. ``configs`` holds the launch file and, under
    DeepSpeed, the JSON as the engine used it. ``meter`` is "cuda" (the caching allocator) or
    "resident" (no GPU). ``parity`` is "exact" or "by design". ``phase`` and ``step`` are where the
    run ended: one of ``harness.phases.RUN_PHASES``, and the step within it. ``key_averages`` are a
    profiler's (``harness.worker.loop``), ``recordings`` the files it or the allocator's history
    left in the run's folder. ``flops_per_step`` 0: they were not counted. ``gpu_samples`` is empty
    without a GPU or nvidia-smi. ``nodes`` and ``wire`` are of runs on several machines; ``token``
    names the launch that wrote it, so that no other launch's result is taken for it. ``beside``:
    how many rows ran at a time, each on its own GPU (0: this one alone); then no time was kept.
    ``drawn``: what a sampling run drew, whose steps are batches of samples; None of a training.
    """

    status: Status
    spec: Spec
    schema: int = SCHEMA
    reason: str | None = None
    way_out: str | None = None
    parity: str = "exact"
    phase: str | None = None
    step: int | None = None
    peak_so_far_bytes: int | None = None
    command: str = ""
    identity: str = ""
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
    key_averages: list[dict[str, Any]] = field(default_factory=list)
    recordings: list[str] = field(default_factory=list)
    gpu_samples: list[GpuSample] = field(default_factory=list)
    nodes: list[NodeRecord] = field(default_factory=list)
    wire: Wire | None = None
    token: str = ""
    beside: int = 0
    drawn: Drawn | None = None

    @classmethod
    def not_run(
        cls, resolved: Any, status: Status, reason: str, way_out: str, **more: Any
    ) -> Result:
        """The row of a run without a worker's result; ``resolved`` is of type ``Resolved``
        and ``more`` are further fields."""
        return cls(
            status=status,
            spec=resolved.spec,
            reason=reason,
            way_out=way_out,
            parity=resolved.recipe.parity.value,
            meter="cuda" if resolved.spec.device == "cuda" else "resident",
            parameters=resolved.subject.parameters,
            micro_batch=resolved.micro_batch,
            accumulation=resolved.recipe.accumulation,
            **more,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for ``json.dump``."""
        return dataclasses.asdict(self)

    def write(self, path: Path) -> None:
        """Write atomically: a reader sees the old file or the new one, never half of one."""
        write_json(path, self.to_json())


def is_rehearsed() -> bool:
    """Return whether host memory takes the place of GPUs in this process (``tests/rehearsal``)."""
    return "REHEARSAL_CARDS" in os.environ


def reported_name(name: str) -> str:
    """The name of a GPU as results and calibrations keep it: ``name``, or ``REHEARSED``."""
    return REHEARSED if is_rehearsed() else name


def load(path: Path) -> Result:
    """Read one result.

    Raises:
        BadResult: not JSON, another schema, a field of the wrong shape, or a row of a rehearsed GPU
            outside a rehearsal; names the file.
    """
    try:
        found = read_json(path, Result, name="result", schema=SCHEMA)
    except BadFile as error:
        raise BadResult(str(error)) from None
    devices = {found.environment.get("device"), *(rank.device for rank in found.ranks)}
    if REHEARSED in devices and not is_rehearsed():
        raise BadResult(f"{path}: of a rehearsed GPU, which is host memory: no measurement")
    return found


def load_all(folder: Path) -> tuple[list[Result], list[str]]:
    """Every ``runs/*/result.json`` below ``folder``, and one line for each file skipped."""
    results, skipped = [], []
    for path in sorted(Path(folder).glob("runs/*/result.json")):
        try:
            results.append(load(path))
        except BadResult as error:
            skipped.append(str(error))
    return results, skipped
