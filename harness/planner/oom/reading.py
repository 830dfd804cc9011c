"""Diagnosis of an out-of-memory error: where it happened, what filled the memory, what helps.
Measures here follow from the numbers and the phase alone. Those that depend on the model are
predicted by the planner (``harness.planner.oom.command``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from harness.planner.oom import log
from harness.planner.oom.log import GPU, Failure
from harness.planner.oom.numbers import SLACK, Numbers
from harness.planner.oom.stack import PHASES, allocates_state
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
    sentence = SENTENCES["certain" if cause == log.KILLED and failure.certain else cause]
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


SENTENCES = {
    "corrupt": "The request exceeds every card: its size was damaged, as when ranks gather "
    "different states or a collective failed.",
    "limit": "The process had limited itself to {limit} of {gpu}.",
    "spilled": "PyTorch held {pool} on a card of {capacity}: Windows had moved the rest to host "
    "memory, and that ended too.",
    "shared": "{count} processes of similar size share {gpu}, as when ranks or workers choose the "
    "same device.",
    "others": "Other processes hold {beside} of {gpu}; without them the request fits.",
    "refused": "{free} were free, more than the request of {requested}: memory of the card is not "
    "what ran out.",
    "pieces": "PyTorch's pool has {cached} that no tensor uses, in pieces too small for the "
    "request of {requested}.",
    "unseen": "{outside} of {gpu} are outside of PyTorch's pool: other processes, a desktop, or "
    "libraries.",
    "own": "{context} of {gpu} are this process's own outside of PyTorch's pool: CUDA's context, "
    "libraries, or another framework.",
    "large": "One request of {requested} exceeds the {left} that were left.",
    "full": "PyTorch's own tensors fill {gpu}: {allocated} of {total}.",
    "cut": "A request of {requested} failed{of_free}; the message's other numbers are missing.",
    "outside": "{library} found no memory on the GPU outside of PyTorch's pool.",
    "either": "The driver found no memory, on the GPU or of the host to pin for copies; without "
    "a stack the message does not tell which.",
    "integrated": "{gpu} has {capacity} of its own: it is an integrated GPU, not a card to train "
    "on.",
    "pinned": "Host memory could not be pinned, as by a copy to the CPU that does not block or by "
    "buffers of an offload; the GPU is not what ran out.",
    "worker": "The host ran out of memory: a loader worker got SIGKILL.",
    "shm": "/dev/shm is full: loader workers pass their batches through it.",
    "paged": "Windows could not commit more memory: host memory and its page file are full.",
    "scheduled": "The job was ended for lack of host memory: it used more than its job or "
    "container may.",
    "host": "Host memory ran out, at a request of {requested}.",
    "mappings": "The process reached the limit on mapped files, at one of {requested}.",
    "mapped": "The host had no address space or commit left to map {requested} of a file.",
    "killed": "The process got SIGKILL, which is nearly always for lack of host memory.",
    "certain": "The kernel ended the process{held} for lack of host memory.",
}
"""Cause -> its sentence; ``certain`` is that of a kill whose sender the kernel names."""


def _later(failure: Failure) -> bool:
    """Return True if steps had fitted before, so this sample was larger or memory was lost."""
    in_step = failure.phase in ("", "forward", "backward")
    return failure.kind == GPU and in_step and bool(failure.steps or failure.trained)


def _where(failure: Failure, gpu: str, cause: str) -> str:
    """Return who ran out of what, in which phase."""
    phase, words = failure.phase, "at a point that the file does not show"
    if phase:
        words = PHASES[phase].words
    if failure.kind == log.PINNED and phase == "load":
        words = "while weights were moved"
    if phase == "optimizer" and (failure.mark == phase or allocates_state(failure.frames)):
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


CONF = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
END = "end process {others}, or take another GPU (no cost)"
SEE = "see who holds it: {smi}; end it, or take another GPU (no cost)"
OF_CAUSE = {
    "integrated": [
        "choose the other GPU: HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES (no cost)",
        "see which GPU has which number: rocminfo or nvidia-smi -L (no cost)",
    ],
    "corrupt": ["look for an earlier error of another rank, such as a timeout of NCCL (no cost)"],
    "limit": ["raise or remove the limit of set_per_process_memory_fraction (no cost)"],
    "spilled": [
        "NVIDIA Control Panel: `CUDA - Sysmem Fallback Policy` to `Prefer No Sysmem Fallback` "
        "(no cost: an error instead of slow steps; WSL 2 ignores it)"
    ],
    "shared": [
        "choose the device first in each rank: torch.cuda.set_device(local_rank) (no cost)",
        "torch.load(..., map_location='cpu'), else all ranks load to GPU 0 (no cost)",
        END,
    ],
    "others": [END],
    "refused": [
        "Windows: enlarge the page file, which must back GPU memory (disk space)",
        "look for another process that ended in the meantime: nvidia-smi -l 1 (no cost)",
    ],
    "pieces": [f"{CONF}, set before torch starts (no cost)"],
    "unseen": [SEE],
    "own": ["look for what allocates beside PyTorch: TensorRT, JAX, NCCL's buffers (no cost)"],
    "either": [
        SEE,
        "watch host memory too; on WSL 2 raise `memory` in .wslconfig, and pin less (no cost)",
    ],
    "outside": [
        "leave room: torch.cuda.set_per_process_memory_fraction(0.95) (5 % of the card)",
        SEE,
    ],
}
"""Cause -> its measures with their cost, the cheapest first."""
FILLED = ("full", "large", "pieces", "spilled", "outside", "cut", "unseen", "own", "either")
"""Causes for which less memory in the phase helps."""
STEP = [
    "activation checkpointing, if it is off (about a third more time a step)",
    "half the micro-batch with twice the accumulation (little time)",
    "frozen weights in 8 or 4 bits, or block swap (slower steps)",
]
OF_PHASE = {
    "optimizer": [
        "an 8-bit optimizer, as adam8bit (no time; quality to be checked)",
        "shard the state over GPUs with zero1 or fsdp2, or offload it (slower steps)",
        "train adapters instead of all weights (another result)",
    ],
    "load": [
        "load in 16 bits, and keep encoders and VAE off the GPU meanwhile (no time a step)",
        "quantize on the CPU before the move to the GPU (a slower start)",
        "build the model sharded: deepspeed.zero.Init, or fsdp2 on meta (no time a step)",
    ],
    "validate": [
        "decode in tiles: vae.enable_tiling() (slower validation)",
        "fewer or smaller validation samples, or none during training",
        "keep text encoders off the GPU in validation: encode the prompts first (no time)",
    ],
    "encode": [
        "encode before the trained model is on the GPU, and keep the results (disk space)",
        "encode in smaller batches, or the VAE in tiles (a slower start)",
        "encoders in 8 bits, or on the CPU (a slower start)",
    ],
    "save": [
        "gather on the CPU: FullStateDictConfig(offload_to_cpu=True, rank0_only=True) (slower)",
        "save shards: SHARDED_STATE_DICT (a later merge)",
    ],
}
"""Phase -> measures for a card that PyTorch's own tensors fill; ``STEP`` for other phases."""


LOADERS = "fewer loader workers (--dataloader_num_workers 0 or 1), and less prefetched"
OF_SYSTEM = {
    log.WORKER: [
        f"{LOADERS} (slower loading)",
        "smaller or cached samples: each worker holds decoded ones (disk space)",
        "confirm it: dmesg -T | grep -i 'killed process' (no cost)",
    ],
    log.SHM: [
        "enlarge it: --shm-size=16g of the container, or --ipc=host (no cost)",
        f"{LOADERS} (slower loading)",
        "torch.multiprocessing.set_sharing_strategy('file_system') (slower loading)",
    ],
    log.PAGED: [
        "enlarge the page file, to twice the host's memory at least (disk space)",
        f"{LOADERS}: each process commits memory of its own (slower loading)",
        "close other programs; load one model at a time (a slower start)",
    ],
    log.SCHEDULED: [
        "raise the job's limit: --mem of Slurm, the memory limit of the container (no cost)",
        "offload less: optimizer state alone, or to NVMe (more of the GPU, or slower steps)",
        f"{LOADERS} (slower loading)",
    ],
}
"""Kind of an error that a system reports -> measures with their cost."""


def _device(failure: Failure) -> str:
    """Return the kind of accelerator that a message names; GPU for any that shares torch's."""
    found = re.search(r"\b([NX]PU|HPU|MLU|TPU)\b", failure.line)
    return found[1] if found else "GPU"


def _measures(cause: str, failure: Failure, numbers: Numbers) -> Iterator[str]:
    """Yield measures with their cost, the cheapest first."""
    if failure.kind != GPU:
        yield from OF_SYSTEM.get(failure.kind) or _of_host(failure)
        return
    yield from OF_CAUSE.get(cause, ())[cause == "outside" and not _library(failure) :]
    short = (numbers.requested or 0) - (numbers.free or 0)
    if cause in ("full", "large") and (numbers.cached or 0) >= max(short, GAIN * numbers.total):
        yield CONF + " (no cost; gains {cached} at most)"
    if cause not in FILLED:
        return
    if numbers.beside >= SLACK:
        yield END
    if _later(failure):
        yield "limit the largest sample: resolution, frames or bucket (smaller samples)"
    code = " ".join(frame.text for frame in failure.frames)
    if "_multi_tensor_" in code:
        yield "the optimizer with fused=True or foreach=False: no copies in its step (little time)"
    checkpointed = "utils/checkpoint.py" in code or "activation_checkpointing" in code
    yield from OF_PHASE.get(failure.phase, STEP[checkpointed:])


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
