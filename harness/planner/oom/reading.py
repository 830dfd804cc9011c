"""Diagnosis of an out-of-memory error: where it happened, what filled the memory, what helps.
Measures here follow from the numbers and the phase alone. Those that depend on the model are
predicted by the planner (``harness.planner.oom.command``)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.planner.oom import log
from harness.planner.oom.log import GPU, PHASES, SLACK, Failure, Numbers
from harness.report.figures.units import GIB

MUCH, UNSEEN, GAIN = 0.1, 0.25, 0.02
"""Shares of the card: from which a part is a cause, memory outside of the pool is one, and memory
that the pool keeps is worth a measure."""
SMALL = GIB
"""Bytes of a GPU that only shares the CPU's memory: no card for training has so little."""
NEAR = (0.5, 2.0)
"""Sizes of another process, relative to this one, at which both look like ranks of one job."""
MOST = 3
"""Most measures."""
LIBRARIES = {"CUBLAS": "cuBLAS", "CUDNN": "cuDNN", "NCCL|nccl|Cuda failure|Failed to CUDA": "NCCL",
             "Triton": "Triton", r"in file .*\.cu\b": "bitsandbytes"}  # fmt: skip
"""Pattern of a message without numbers -> the library that found no memory."""
BARE = re.compile(r"(?:CUDA|HIP) error: out of memory")
"""The driver's error, of memory on the GPU or of host memory to be pinned."""
OWN = re.compile(r"OutOfMemoryError|Allocation on device")
"""Errors of PyTorch's own pool, as cudaMallocAsync writes it too."""
ABSURD = "more than 1EB"
"""Size in torch's message for a request that no card could serve."""
MAPPED = "unable to mmap"
"""torch's message for a file that it cannot map: a checkpoint, or tensors between processes."""
FEW = 2**20
"""Bytes of a mapping that no host lacks: the number of mappings has ended."""
MANAGED = "pythonInterface"
"""File in messages of bitsandbytes' paged optimizers, whose memory the host has to back."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Diagnosis: the ``cause`` by name, its ``sentence``, where it happened, and measures."""

    cause: str
    sentence: str
    where: str
    measures: list[str]


def read(failure: Failure, numbers: Numbers | None = None) -> Reading:
    """Return the diagnosis of an error. ``numbers`` replace those of its message."""
    numbers = numbers or failure.numbers
    cause, words = _cause(failure, numbers), _words(failure, numbers)
    named = "certain" if cause == log.KILLED and failure.certain else cause
    sentence = CAUSES[named]["sentence"]
    if numbers.below:
        sentence += " The stated free memory is an underflow: about -{below}."
    measures = [text.format(**words) for text in _measures(cause, failure, numbers)]
    return Reading(
        cause=cause,
        sentence=sentence.format(**words),
        where=_where(failure, words["gpu"], cause),
        measures=list(dict.fromkeys(measures))[:MOST],
    )


def gib(size: int | None) -> str:
    """Return bytes in GiB, small ones in MiB."""
    if size is None:
        return "an unknown size"
    return f"{size / GIB:.1f} GiB" if size >= GIB / 2 else f"{size / 2**20:.0f} MiB"


def _words(failure: Failure, numbers: Numbers) -> dict[str, str]:
    names = ("requested", "free", "allocated", "cached", "process", "limit", "capacity", "pool",
             "total", "beside", "below", "context")  # fmt: skip
    largest = sorted(numbers.others.items(), key=lambda item: -item[1])[:3]
    left = numbers.capacity - numbers.pool if numbers.capacity else None
    stated = numbers.free is not None
    return {
        **{name: gib(getattr(numbers, name)) for name in names},
        "left": gib(numbers.free) if stated or left is None else f"at most {gib(max(0, left))}",
        "of_free": f" with {gib(numbers.free)} free" if stated else "",
        "gpu": f"{_device(failure)} {numbers.gpu}" if numbers.gpu else f"the {_device(failure)}",
        "held": f", which held {gib(numbers.process)}," if numbers.process else "",
        "outside": gib(numbers.unseen + numbers.context),
        "count": str(1 + len(numbers.others)),
        "others": ", ".join(f"{pid} ({gib(size)})" for pid, size in largest),
        "library": _library(failure) or "A library or the driver",
        "smi": "rocm-smi" if re.search(r"\bHIP|\bhip", failure.line) else "nvidia-smi",
    }


def _cause(failure: Failure, numbers: Numbers) -> str:
    """Return the cause by the first rule that holds."""
    if failure.kind == log.HOST and MAPPED in failure.text:
        return "mappings" if (numbers.requested or 0) < FEW else "mapped"
    if failure.kind != GPU:
        return failure.kind
    if ABSURD in failure.line:
        return "corrupt"
    if numbers.capacity and numbers.capacity <= SMALL:
        return "integrated"
    if not numbers.known:
        if BARE.search(failure.line) and not _library(failure) and not failure.frames:
            return "either"
        pool = numbers.requested or OWN.search(failure.text)
        return "cut" if pool and not _library(failure) else "outside"
    much, short = MUCH * numbers.total, numbers.requested - (numbers.free or 0)
    if numbers.limit and numbers.pool + numbers.requested > numbers.limit:
        return "limit"
    if numbers.capacity and numbers.pool > numbers.capacity + SLACK:
        return "spilled"
    if numbers.beside >= max(short, much):
        own = max(1, numbers.process or numbers.pool)
        ranks = any(NEAR[0] <= size / own <= NEAR[1] for size in numbers.others.values())
        return "shared" if ranks else "others"
    if short < -SLACK:
        return "refused"
    if (numbers.cached or 0) >= max(short, much):
        return "pieces"
    whole = numbers.capacity and numbers.free is not None
    if whole and numbers.unseen + numbers.context >= max(short, UNSEEN * numbers.total):
        return "own" if numbers.context > numbers.unseen else "unseen"
    return "large" if numbers.requested >= much else "full"


def _library(failure: Failure) -> str:
    """Return the library that a message without numbers names; empty if none."""
    found = (name for pattern, name in LIBRARIES.items() if re.search(pattern, failure.line))
    return next(found, "")


def _later(failure: Failure) -> bool:
    """Return True if steps had fitted before, so this sample was larger or memory was lost."""
    in_step = failure.phase in ("", "forward", "backward")
    return failure.kind == GPU and in_step and bool(failure.steps or failure.trained)


def _where(failure: Failure, gpu: str, cause: str) -> str:
    """Return who ran out of what, in which phase."""
    phase, words = failure.phase, "at a point that the file does not show"
    stack = [frame.text for frame in failure.frames]
    if phase:
        words = PHASES[phase]["words"]
    if failure.kind == log.PINNED and phase == "load":
        words = "while weights were moved"
    if phase == "optimizer" and (failure.mark == phase or any(map(STATE.search, stack))):
        words = "while the optimizer allocated its state"
        words += " in its first step" if failure.frames and not failure.steps else ""
    elif _later(failure):
        count = f"{failure.steps} steps" if failure.steps else "a batch"
        words += f", after {count} had fitted"
    what = {GPU: f"{gpu} ran out of memory", log.KILLED: "the process was ended",
            log.SCHEDULED: "the job was ended", log.SHM: "shared memory ran out"}  # fmt: skip
    what |= {GPU: "the GPU or the host ran out of memory"} if cause == "either" else {}
    rank = f"rank {failure.rank}: " if failure.rank else ""
    return f"{rank}{what.get(failure.kind, 'the host ran out of memory')} {words}"


CAUSES: Mapping[str, Mapping[str, Any]] = log.TABLE["causes"]
CONF = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (no cost; gains {cached} at most)"
STATE = re.compile(r"_init_group|init_state|zeros_like|initialize_optimizer_states")
"""Frames of an optimizer that allocates its state, which most do in the first step."""


def _device(failure: Failure) -> str:
    """Return the kind of accelerator that a message names; GPU for any that shares torch's."""
    found = re.search(r"\b([NX]PU|HPU|MLU|TPU)\b", failure.line)
    return found[1] if found else "GPU"


def _measures(cause: str, failure: Failure, numbers: Numbers) -> Iterator[str]:
    """Yield measures with their cost, the cheapest first."""
    own = CAUSES[cause].get("measures", ())
    if failure.kind != GPU:
        yield from own or _of_host(failure)
        return
    yield from own[cause == "outside" and not _library(failure) :]
    short = (numbers.requested or 0) - (numbers.free or 0)
    if cause in ("full", "large") and (numbers.cached or 0) >= max(short, GAIN * numbers.total):
        yield CONF
    if "filled" not in CAUSES[cause]:
        return
    if numbers.beside >= SLACK:
        yield from CAUSES["others"]["measures"]
    if _later(failure):
        yield "limit the largest sample: resolution, frames or bucket (smaller samples)"
    code = " ".join(frame.text for frame in failure.frames)
    if "_multi_tensor_" in code:
        yield "the optimizer with fused=True or foreach=False: no copies in its step (little time)"
    checkpointed = "utils/checkpoint.py" in code or "activation_checkpointing" in code
    of_phase = PHASES.get(failure.phase, {})
    yield from of_phase.get("measures", log.TABLE["step"][checkpointed:])


def _of_host(failure: Failure) -> Iterator[str]:
    if MAPPED in failure.text:
        yield "sysctl -w vm.max_map_count=1048576 if many small files are mapped (no cost)"
        yield "a higher ulimit -v and vm.overcommit_memory=1 if a large one is (no cost)"
        yield "load on one rank after another; fewer loader workers (slower)"
        return
    if not failure.certain:
        yield "confirm it: dmesg -T | grep -i 'killed process' (no cost)"
    if failure.kind == log.PINNED:
        yield "pin less: pin_memory false in the DeepSpeed JSON and loaders (slower copies)"
    if failure.kind == log.PINNED or MANAGED in failure.text:
        yield "WSL 2: raise `memory` in .wslconfig; pinned memory has a limit there (no cost)"
    less = "offload less: optimizer state alone, or to NVMe (more of the GPU, or slower steps)"
    encoding = "cache in smaller batches and fewer processes (a slower start)"
    yield encoding if failure.phase == "encode" else less
    if failure.phase == "load":
        yield "load in 16 bits, in one process at a time (a slower start)"
    yield "fewer loader workers and processes a machine (slower loading)"
