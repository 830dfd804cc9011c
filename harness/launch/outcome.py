"""Outcome of a run in one word and one sentence: a pure function of the facts left behind.

The result file decides, not the exit code: a finished DeepSpeed run sometimes exits 1 at shutdown.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness import RUN
from harness.launch.command import group_seconds
from harness.phases import RUN_PHASES
from harness.result import Status
from strategies.advice import suggestions

# The launcher's own tracebacks hide the worker's; only their last line is informative.
LAUNCHER = re.compile(
    r"^Traceback \(most recent call last\):\n"
    r"  File \"[^\"\n]*(?:bin/accelerate|accelerate/commands/|<frozen runpy>)[^\"\n]*\""
    r".*?accelerate/commands/.*?(?=^\S)",
    re.MULTILINE | re.DOTALL,
)
NOISE = re.compile(
    r"\*{20,}|Setting OMP_NUM_THREADS environment variable|Setting accelerator to CPU"
    r"|FutureWarning|DeprecationWarning|UserWarning|^\s*warnings\.warn|^\s*return func\("
    r"|were not passed to `accelerate launch`|`--num_cpu_threads_per_process`"
    r"|To avoid this warning pass in values|built successfully|^\s*\d+%\|.*\||\|.*it/s"
    r"|Using .* as PyTorch extensions root|ninja: no work to do|Loading extension module"
    r"|Time to load \w+ op|\[INFO\]|^W\d{4} [\d:.]+ \d+ \S+\]\s*$|^-{20,}$|^={20,}$|^\^+$"
)
# Lines that mention a handled fault.
HARMLESS = re.compile(r"ignoring|retrying|autotun|falling back|will be skipped", re.IGNORECASE)
ERROR = re.compile(
    r"^(?:\[rank\d+\]:?\s*)?(?:[\w.]+(?:Error|Exception|Interrupt|Exit)\b|[\w.]+: error:)"
)
WRAPPER = re.compile(
    r"ChildFailedError|CalledProcessError|SignalException|RendezvousConnectionError"
)


def informative(text: str) -> list[str]:
    """Return the lines without progress bars, banners, warnings and launcher tracebacks."""
    text = LAUNCHER.sub("", text.replace("\r\n", "\n"))
    lines = (line.rpartition("\r")[2].rstrip() for line in text.splitlines())
    kept: list[str] = []
    for line in lines:
        if line.strip() and not NOISE.search(line) and (not kept or kept[-1] != line):
            kept.append(line)
    return kept


def tail(text: str, lines: int = 40) -> str:
    return "\n".join(informative(text)[-lines:])


def first_match(pattern: re.Pattern[str], text: str) -> str:
    """Return the first line that matches ``pattern`` and is not a harmless mention; else empty."""
    for line in text.splitlines():
        if pattern.search(line) and not HARMLESS.search(line):
            return re.sub(r"^\[rank\d+\]:?\s*", "", line.strip())
    return ""


def decisive(text: str) -> str:
    """Return the last line that names an error, launchers' wrappers last; else the last line."""
    lines = informative(text)
    errors = [line for line in lines if ERROR.search(line)]
    causes = [line for line in errors if not WRAPPER.search(line)]
    chosen = (causes or errors or lines or [""])[-1]
    return re.sub(r"^\[rank\d+\]:?\s*", "", chosen.strip())


PHASES = tuple(RUN_PHASES)
TRAINING = PHASES[PHASES.index("warmup") :]

# Messages of the device's allocator and of libraries on top of it; torch.OutOfMemoryError is the
# device's. Inductor reports a kernel's lack of shared memory as "OutOfMemoryError: out of
# resource". The table in tests/launch/test_outcome.py has each message with its source.
GPU_OOM = re.compile(
    r"(?:CUDA|HIP|XPU) out of memory|\bOutOfMemoryError\b(?!: out of resource)"
    r"|(?:CUDA|HIP)(?: driver| runtime)? error: out of memory"
    r"|Error \[CUDA\]: out of memory|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory"
    r"|cudaErrorMemoryAllocation|CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED"
    r"|Cuda failure.*out of memory|Failed to CUDA [mc]alloc"
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling .?cublas(?:Lt)?Create"
    r"|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    r"|NVML_SUCCESS == .* INTERNAL ASSERT FAILED at .*CUDACachingAllocator"
    r"|Error out of memory at line \d+ in file (?!.*pythonInterface)"
)
# After a kernel's failed assertion every call fails, cublasCreate too.
ASSERTED = re.compile(r"device-side assert|Assertion .* failed|illegal memory access")
# Pinned memory is host memory, although the message comes from CUDA.
PINNED = re.compile(
    r"\bCudaError: out of memory \(2\)|Failed to CUDA host alloc"
    r"|could not allocate pinned host memory|failed to alloc \d+ bytes on host"
    r"|(?:cudaHostAlloc|cudaMallocHost|cudaHostRegister|cuMemHostAlloc).*out of memory"
    r"|out of memory.*(?:cudaHostAlloc|cudaMallocHost|cudaHostRegister|cuMemHostAlloc)",
    re.DOTALL,
)
PINNING = re.compile(r"pin[_ ]memory|get_pinned|pinned_allocator|CachingHostAllocator")
HOST_OOM = re.compile(
    r"\b_?(?:Array)?MemoryError\b|std::bad_alloc|DefaultCPUAllocator: (?:can't|not enough)"
    r"|(?<!with error )Cannot allocate memory|\[Errno 12\]|Unable to allocate .* for an array"
    r"|System unable to allocate necessary resources"
    r"|CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"
    # bitsandbytes' paged optimizer takes managed memory, which the host has to back.
    r"|Error out of memory at line \d+ in file .*pythonInterface"
)
SHM_FULL = re.compile(
    r"insufficient shared memory|(?:/torch_|/dev/shm|shared memory).*No space left on device"
    r"|No space left on device.*(?:/torch_|/dev/shm|shared memory)|SIGBUS|Bus error"
)
DISK_FULL = re.compile(r"No space left on device|\[Errno 28\]|Disk quota exceeded")
ADDRESS = re.compile(r"EADDRINUSE|Address already in use", re.IGNORECASE)
SIGKILLED = re.compile(r"Signal 9 \(SIGKILL\)|exitcode\s*: -9\b|Signals\.SIGKILL")
CRASHED = re.compile(r"(?:Signal \d+ \(|Signals\.)(SIG(?:SEGV|ABRT|ILL|FPE))")
# NCCL's watchdog and C++ print the reason before they abort the process.
WATCHDOG = re.compile(r"Watchdog caught collective operation timeout")
THROWN = re.compile(r"^\s*what\(\):\s*\S")
# Messages of other ranks after one has died: true, but never the cause.
SECONDARY = re.compile(
    r"Connection (?:closed|reset|refused)|Broken pipe|closed by peer|remote process exited"
    r"|DistStoreError|DistNetworkError|Socket Timeout|recvValue failed|Timed out waiting"
    r"|Watchdog caught"
)
ILLEGAL = r"illegal memory access|mha_graph\.execute"
WAYS_OUT = {
    r"invalid device ordinal|Duplicate GPU": "give at most as many --processes as there are GPUs",
    r"ModuleNotFoundError|ImportError": f"install the missing package; {RUN} doctor lists them",
    r"no kernel image is available": "install a torch build that supports this GPU",
    r"Call to ibv_\w+ failed .*Cannot allocate": "raise ulimit -l, locked memory's limit",
    ILLEGAL: "CUDA_LAUNCH_BLOCKING=1 shows the operation",
    r"Watchdog caught|Timed out waiting": "a rank waited for another until a timeout: see log.txt",
}
CUDNN_FAILS = (
    "add attend:kernel=flash, since cuDNN's attention fails so in Flux on Hopper cards; else "
)
"""Before the way out of an illegal access, for a recipe that leaves the attention to torch."""
SHELL_SIGKILL = 128 + 9  # by number: Windows has no signal.SIGKILL
READ_LOG = "read log.txt in the run's folder"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts known after a run has ended.

    ``result`` is the status in the worker's result file; ``failures`` and ``statuses`` are the
    ranks' files; ``log`` is the end of the output. Kills are the kernel's, during the run.
    ``shell_limit`` is the command and the bytes of the shell's own limit (``ulimit -v``).
    """

    exit_code: int | None = None
    signal: int | None = None
    stopped: str | None = None
    timeout_seconds: float | None = None
    result: Status | None = None
    result_reason: str | None = None
    result_way_out: str | None = None
    failures: tuple[Mapping[str, Any], ...] = ()
    statuses: tuple[Mapping[str, Any], ...] = ()
    log: str = ""
    machine_kills: int = 0
    group_kills: int = 0
    group_limit_bytes: int | None = None
    shell_limit: tuple[str, int] | None = None
    recipe: str = ""
    processes: int = 1


class Outcome(NamedTuple):
    """The row's status; ``reason`` and ``hint`` (a remedy) are one sentence each."""

    status: Status
    reason: str | None = None
    hint: str | None = None


def classify(facts: Facts) -> Outcome:
    """Return the outcome by the first rule that holds for the facts."""
    if facts.result is not None:
        return Outcome(facts.result, facts.result_reason, facts.result_way_out)
    at, causes = _at(facts), _causes(facts)
    if facts.stopped == "interrupted":
        hint = "run the suite again: it resumes at this row"
        return Outcome(Status.INTERRUPTED, f"interrupted in {at}", hint)
    for failure in causes:
        if known := _of_failure(facts, failure):
            return known
    ended = facts.signal == signal.SIGKILL or facts.exit_code == SHELL_SIGKILL
    killed = facts.stopped is None and (ended or bool(SIGKILLED.search(facts.log)))
    if killed and (facts.machine_kills or facts.group_kills):
        size = facts.group_limit_bytes
        container = "the container's memory limit" + (f" of {_gib(size)}" if size else "")
        who = container if facts.group_kills else "the kernel's out-of-memory killer"
        return _host(facts, f"killed (SIGKILL) in {at} by {who}")
    if facts.stopped == "timeout":
        limit = f"{facts.timeout_seconds:g} s" if facts.timeout_seconds else "its deadline"
        reason = f"not finished after {limit}: stopped in {at}"
        if facts.processes > 1:
            waits = group_seconds(facts.timeout_seconds)
            waited = f" of {waits:g} s" if waits else ""
            reason += f"; this deadline came before the process groups' timeout{waited}"
        return Outcome(Status.TIMEOUT, reason, "give a longer --timeout, or fewer --steps")
    if causes:
        text, hint = headline(causes[0]), " ".join(str(causes[0].get("hint", "")).split())
        reason = f"{_rank(causes[0])} failed in {at}: {_line(text)}"
        return Outcome(Status.FAILED, reason, hint or _hint(text, facts))
    if known := _of_log(facts):  # from the output of ranks that crashed in native code
        return known
    if killed:
        reason = "killed by SIGKILL from outside; the kernel counted no out-of-memory kill"
        hint = "find the sender: a job scheduler, earlyoom or systemd-oomd"
        return Outcome(Status.FAILED, f"{reason}, in {at}", hint)
    if crash := CRASHED.search(facts.log):
        said = first_match(THROWN, facts.log).removeprefix("what():").strip()
        reason = f"a process crashed with {crash[1]} in {at}"
        return Outcome(Status.FAILED, reason + (f": {_line(said)}" if said else ""), READ_LOG)
    return _unexplained(facts)


def retryable(facts: Facts) -> bool:
    """Return whether a taken port was the only error, before anything was trained."""
    texts = [headline(f) for f in facts.failures] + [facts.log]
    begun = any(status.get("phase") in TRAINING for status in facts.statuses)
    ended = facts.result is not None or facts.stopped or begun
    return not ended and any(ADDRESS.search(text) for text in texts)


def where(facts: Facts) -> tuple[str, int]:
    """Return phase and step of the rank that failed, else of the rank that came least far."""
    known = _causes(facts) or facts.failures or facts.statuses
    places = [(str(f.get("phase", "start")), int(f.get("step") or 0)) for f in known]
    places = [(p if p in PHASES else "start", step) for p, step in places]
    return min(places, key=lambda p: (PHASES.index(p[0]), p[1]), default=("start", 0))


def _causes(facts: Facts) -> list[Mapping[str, Any]]:
    """Return the failures without those that another rank's death explains."""
    texts = [(failure, headline(failure)) for failure in facts.failures]
    return [f for f, text in texts if GPU_OOM.search(text) or not SECONDARY.search(text)]


def headline(failure: Mapping[str, Any]) -> str:
    return f"{failure.get('type', '')}: {failure.get('message', '')}"


def _rank(failure: Mapping[str, Any]) -> str:
    """Return the failed rank's name; ranks of other nodes have a host."""
    host = failure.get("host")
    return f"rank {failure.get('rank', 0)}" + (f" on {host}" if host else "")


def _of_failure(facts: Facts, failure: Mapping[str, Any]) -> Outcome | None:
    """Return an out-of-memory outcome from an exception that a rank reported."""
    pinning = PINNING.search("\n".join(str(failure.get("traceback", "")).splitlines()[-12:]))
    device_type = str(failure.get("type", "")).endswith("OutOfMemoryError")
    pinned = pinning is not None and not device_type
    return _of_memory(facts, headline(failure), f"{_rank(failure)} ", pinned=pinned)


def _of_memory(facts: Facts, text: str, who: str = "", *, pinned: bool = False) -> Outcome | None:
    """Return the outcome of ``text`` if it says that memory is full; ``who`` said it.

    ``pinned``: the device's message came while host memory was pinned.
    """
    at, device = f"in {_at(facts)}: {_line(text)}", GPU_OOM.search(text)
    if PINNED.search(text) or (device and pinned):
        return _host(facts, f"{who}could not pin host memory {at}")
    if device and not ("CUBLAS_STATUS_NOT_INITIALIZED" in text and ASSERTED.search(facts.log)):
        others = re.search(r"Process (\d+) has ([\d.]+ [KMG]iB)", text)
        also = f"; process {others[1]} holds {others[2]} of the GPU as well" if others else ""
        hint = suggestions(facts.recipe, facts.processes, host=False)
        return Outcome(Status.GPU_OOM, f"{who}ran out of GPU memory {at}", hint + also)
    if SHM_FULL.search(text):
        hint = "enlarge /dev/shm (docker run --shm-size=8g), or delete files in it"
        bus = re.search("SIGBUS|Bus error", text)
        what = "bus error, as when /dev/shm is full" if bus else "shared memory is full"
        return Outcome(Status.FAILED, f"{what}: {_line(text)}", hint)
    return _host(facts, f"{who}ran out of host memory {at}") if HOST_OOM.search(text) else None


def _of_log(facts: Facts) -> Outcome | None:
    """Return the outcome that the output shows: full memory, a taken port, a hung collective."""
    for pattern in (PINNED, GPU_OOM, HOST_OOM, SHM_FULL):
        if found := _of_memory(facts, first_match(pattern, facts.log)):
            return found
    if line := first_match(ADDRESS, facts.log):
        reason = f"the port on which the processes meet was in use: {_line(line)}"
        return Outcome(Status.FAILED, reason, "run it again: each run chooses a free port")
    if line := first_match(WATCHDOG, facts.log):
        reason = f"a collective of NCCL ran into its group's timeout in {_at(facts)}: {_line(line)}"
        return Outcome(Status.FAILED, reason, _hint(line, facts))
    return None


def _unexplained(facts: Facts) -> Outcome:
    ended = f"exit code {facts.exit_code}" if facts.signal is None else f"signal {facts.signal}"
    if facts.stopped == "lingered":
        ended = "a failure, and hung after it"
    line = decisive(facts.log)
    if facts.failures and (not line or SECONDARY.search(line)):
        line = headline(facts.failures[0])
    said = f": {_line(line)}" if line else ", with no message"
    return Outcome(Status.FAILED, f"no result in {_at(facts)}, {ended}{said}", _hint(line, facts))


def _host(facts: Facts, reason: str) -> Outcome:
    hint = suggestions(facts.recipe, facts.processes, host=True)
    if facts.processes > 1:
        hint += f", or fewer --processes than {facts.processes}"
    if facts.shell_limit and not (facts.machine_kills or facts.group_kills):
        name, size = facts.shell_limit
        reason += f" (below the limit {name} of {_gib(size)})"
        hint = f"{name} unlimited, then the same command in that shell; or {hint}"
    return Outcome(Status.HOST_OOM, reason, hint)


def _hint(text: str, facts: Facts) -> str:
    if DISK_FULL.search(text):
        return "free space on the disk of the results folder"
    way = next((way for pattern, way in WAYS_OUT.items() if re.search(pattern, text)), READ_LOG)
    cudnn = re.search(ILLEGAL, text) and "attend:kernel=" not in facts.recipe
    return CUDNN_FAILS + way if cudnn else way


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _at(facts: Facts) -> str:
    phase, step = where(facts)
    return f"phase {phase}, step {step}" if step else f"phase {phase}"


def _line(text: str, width: int = 240) -> str:
    """Return the first line of a message, cut to ``width``."""
    line = next((part.strip() for part in text.splitlines() if part.strip(" :")), "").rstrip(":. ")
    return line if len(line) <= width else line[: width - 3] + "..."
