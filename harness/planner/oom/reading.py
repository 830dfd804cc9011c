"""Diagnosis of an out-of-memory error: where it happened, what filled the memory, what helps.

Measures here follow from the numbers and the phase alone. Those that depend on the model are
predicted by the planner (``harness.planner.oom.command``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from harness.planner.oom.log import GPU, HOST, KILLED, PINNED, Failure
from harness.planner.oom.numbers import SLACK, Numbers
from harness.planner.oom.stack import PHASES, allocates_state
from harness.report.figures.units import GIB

MUCH = 0.1
"""Share of the card from which a part counts as a cause."""
NEAR = (0.5, 2.0)
"""Sizes of another process, relative to this one, at which both look like ranks of one job."""
GAIN = 0.02
"""Share of the card from which memory that the pool keeps is worth a measure."""
MOST = 3
"""Most measures."""
CONF = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
LIBRARIES = {"CUBLAS": "cuBLAS", "CUDNN": "cuDNN", "NCCL|nccl|Cuda failure|Failed to CUDA": "NCCL",
             "Triton": "Triton", r"in file .*\.cu\b": "bitsandbytes"}  # fmt: skip
"""Pattern of a message without numbers -> the library that found no memory."""
ABSURD = "more than 1EB"
"""Size in torch's message for a request that no card could serve."""
MANAGED = "pythonInterface"
"""File in messages of bitsandbytes' paged optimizers, whose memory the host has to back."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Diagnosis: the ``cause`` by name, its ``sentence``, where it happened, and measures."""

    cause: str
    sentence: str
    where: str
    measures: list[str]


def read(failure: Failure) -> Reading:
    """Return the diagnosis of an error."""
    numbers = failure.numbers
    return diagnose(failure, numbers)


def diagnose(failure: Failure, numbers: Numbers) -> Reading:
    """Return the diagnosis of an error whose numbers are known apart from its message."""
    cause = _cause(failure, numbers)
    return Reading(
        cause=cause,
        sentence=SENTENCES[cause](failure, numbers),
        where=_where(failure, numbers),
        measures=list(_measures(cause, failure, numbers))[:MOST],
    )


def gib(size: int | None) -> str:
    """Return bytes in GiB, small ones in MiB."""
    if size is None:
        return "unknown"
    return f"{size / GIB:.1f} GiB" if size >= GIB / 2 else f"{size / 2**20:.0f} MiB"


# ---- cause ----


def _cause(failure: Failure, numbers: Numbers) -> str:
    """Return the cause by the first rule that holds."""
    if failure.kind != GPU:
        return failure.kind
    if ABSURD in failure.line:
        return "corrupt"
    if not numbers.known:
        return "cut" if numbers.requested and not _named_library(failure) else "outside"
    free, much = numbers.free or 0, MUCH * numbers.total
    short = numbers.requested - free
    if numbers.limit and numbers.pool + numbers.requested > numbers.limit:
        return "limit"
    if numbers.capacity and numbers.pool > numbers.capacity + SLACK:
        return "spilled"
    if numbers.beside >= max(short, much):
        return "shared" if _ranks(numbers) else "others"
    if short < -SLACK:
        return "refused"
    if (numbers.cached or 0) >= max(short, much):
        return "pieces"
    if numbers.unseen + numbers.context >= max(short, numbers.total / 4):
        return "unseen"
    return "large" if numbers.requested >= much else "full"


def _ranks(numbers: Numbers) -> bool:
    """Return True if processes about as large as this one are on the same GPU."""
    own = numbers.process or numbers.pool
    return any(NEAR[0] <= size / max(1, own) <= NEAR[1] for size in numbers.others.values())


def _named_library(failure: Failure) -> str:
    found = (name for pattern, name in LIBRARIES.items() if re.search(pattern, failure.line))
    return next(found, "")


def _library(failure: Failure) -> str:
    return _named_library(failure) or "A library or the driver"


def _named(numbers: Numbers) -> str:
    return f"GPU {numbers.gpu}" if numbers.gpu else "the GPU"


def _killed(failure: Failure, numbers: Numbers) -> str:
    if failure.certain:
        size = f", when it held {gib(numbers.process)}" if numbers.process else ""
        return f"The kernel ended the process because host memory ran out{size}."
    return "The process was ended by SIGKILL, which is nearly always for lack of host memory."


SENTENCES = {
    "corrupt": lambda f, n: (
        "The request exceeds every card: its size was damaged, as when ranks gather different "
        "states or a collective failed."
    ),
    "limit": lambda f, n: f"The process had limited itself to {gib(n.limit)} of {_named(n)}.",
    "spilled": lambda f, n: (
        f"PyTorch held {gib(n.pool)} on a card of {gib(n.capacity)}: Windows had moved the rest to "
        "host memory, and that ended too."
    ),
    "shared": lambda f, n: (
        f"{1 + len(n.others)} processes of similar size share {_named(n)}, as when ranks or "
        "workers choose the same device."
    ),
    "others": lambda f, n: (
        f"Other processes hold {gib(n.beside)} of {_named(n)}; without them the request fits."
    ),
    "refused": lambda f, n: (
        f"{gib(n.free)} were free, more than the request of {gib(n.requested)}: memory of the card "
        "is not what ran out."
    ),
    "pieces": lambda f, n: (
        f"PyTorch's pool has {gib(n.cached)} that no tensor uses, in pieces too small for the "
        f"request of {gib(n.requested)}."
    ),
    "large": lambda f, n: (
        f"One request of {gib(n.requested)} exceeds the {gib(n.free)} that were left."
    ),
    "full": lambda f, n: (
        f"PyTorch's own tensors fill {_named(n)}: {gib(n.allocated)} of {gib(n.total)}."
    ),
    "unseen": lambda f, n: (
        f"{gib(n.unseen + n.context)} of {_named(n)} are outside of PyTorch's pool: other "
        "processes, a desktop, or libraries."
    ),
    "cut": lambda f, n: (
        f"A request of {gib(n.requested)} failed; the message's other numbers are missing."
    ),
    "outside": lambda f, n: (
        f"{_library(f)} found no memory on the GPU outside of PyTorch's pool."
    ),
    PINNED: lambda f, n: "Host memory could not be pinned; the GPU is not what ran out.",
    HOST: lambda f, n: (
        "Host memory ran out"
        + (f" at a request of {gib(n.requested)}." if n.requested else ".")
    ),
    KILLED: _killed,
}  # fmt: skip
"""Cause -> its sentence."""


def _where(failure: Failure, numbers: Numbers) -> str:
    """Return who ran out of what, in which phase."""
    phase, words = failure.phase, "at a point that the file does not show"
    if phase:
        words = PHASES[phase].words
    if phase == "optimizer" and allocates_state(failure.frames):
        words = "while the optimizer allocated its state"
        words += " in its first step" if not failure.steps else ""
    elif _later(failure):
        count = f"{failure.steps} steps" if failure.steps else "a batch"
        words += f", after {count} had fitted"
    what = _named(numbers) if failure.kind == GPU else "the host"
    end = "ran out of memory"
    if failure.kind == KILLED:
        what, end = "the process", "was ended"
    rank = f"rank {failure.rank}: " if failure.rank else ""
    return f"{rank}{what} {end} {words}"


def _later(failure: Failure) -> bool:
    """Return True if equal work had fitted before, so that this sample was larger or memory was
    lost."""
    in_step = failure.phase in ("", "forward", "backward")
    return failure.kind == GPU and in_step and bool(failure.steps or failure.trained)


# ---- measures ----


def _measures(cause: str, failure: Failure, numbers: Numbers) -> Iterator[str]:
    """Yield measures with their cost, the cheapest first."""
    yield from _of_cause(cause, failure, numbers)
    cached, short = numbers.cached or 0, (numbers.requested or 0) - (numbers.free or 0)
    if cause in ("full", "large") and cached >= max(short, GAIN * numbers.total):
        yield f"{CONF} (no cost; gains {gib(cached)} at most)"
    if cause in ("full", "large", "pieces", "spilled", "outside", "cut", "unseen"):
        if numbers.beside >= SLACK:
            yield _end_others(numbers)
        yield from _of_phase(failure)


def _end_others(numbers: Numbers) -> str:
    largest = sorted(numbers.others.items(), key=lambda item: -item[1])[:3]
    held = ", ".join(f"{pid} ({gib(size)})" for pid, size in largest)
    return f"end process {held}, or take another GPU (no cost)"


def _of_cause(cause: str, failure: Failure, numbers: Numbers) -> Iterator[str]:
    if cause == "pieces":
        yield f"{CONF}, set before torch starts (no cost)"
    elif cause == "others":
        yield _end_others(numbers)
    elif cause == "shared":
        yield "choose the device first in each rank: torch.cuda.set_device(local_rank) (no cost)"
        yield "torch.load(..., map_location='cpu'), else all ranks load to GPU 0 (no cost)"
        yield _end_others(numbers)
    elif cause in EACH:
        yield from EACH[cause]
    elif cause == "outside" and not _named_library(failure):
        yield from EACH["unseen"]
    elif cause == "outside":
        yield "leave room: torch.cuda.set_per_process_memory_fraction(0.95) (5 % of the card)"
    elif cause in (HOST, KILLED, PINNED):
        yield from _of_host(failure)


EACH = {
    "corrupt": ["look for an earlier error of another rank, such as a timeout of NCCL (no cost)"],
    "limit": ["raise or remove the limit of set_per_process_memory_fraction (no cost)"],
    "spilled": ["keep to the card: NVIDIA's setting `CUDA - Sysmem Fallback Policy` (no cost)"],
    "unseen": ["see who holds it: nvidia-smi; end it, or take another GPU (no cost)"],
    "refused": [
        "Windows: enlarge the page file, which must back GPU memory (disk space)",
        "look for another process that ended in the meantime: nvidia-smi -l 1 (no cost)",
    ],
}
"""Cause -> its measures."""


def _of_host(failure: Failure) -> Iterator[str]:
    if failure.kind == KILLED and not failure.certain:
        yield "confirm it: dmesg -T | grep -i 'killed process' (no cost)"
    if failure.kind == PINNED:
        yield "pin less: pin_memory false in the DeepSpeed JSON and loaders (slower copies)"
    if failure.kind == PINNED or MANAGED in failure.text:
        yield "WSL 2: raise `memory` in .wslconfig; pinned memory has a limit there (no cost)"
    yield "offload less: optimizer state alone, or to NVMe (more of the GPU, or slower steps)"
    if failure.phase == "load":
        yield "load in 16 bits, in one process at a time (a slower start)"
    yield "fewer loader workers and processes a machine (slower loading)"


def _of_phase(failure: Failure) -> Iterator[str]:
    if _later(failure):
        yield "limit the largest sample: resolution, frames or bucket (smaller samples)"
    code = " ".join(frame.text for frame in failure.frames)
    if "_multi_tensor_" in code:
        yield "the optimizer with fused=True or foreach=False: no copies in its step (little time)"
    on = failure.phase != "optimizer" and ("utils/checkpoint.py" in code or "checkpointing" in code)
    measures = OF_PHASE.get(failure.phase, OF_PHASE["forward"])
    yield from measures[1:] if on and measures is OF_PHASE["forward"] else measures


OF_PHASE = {
    "forward": [
        "activation checkpointing, if it is off (about a third more time a step)",
        "half the micro-batch with twice the accumulation (little time)",
        "frozen weights in 8 or 4 bits, or block swap (slower steps)",
    ],
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
        "save on CPU copies: {k: v.cpu() for k, v in state.items()} (slower saving)",
    ],
}  # fmt: skip
"""Phase -> measures for a card that PyTorch's own tensors fill."""
OF_PHASE["backward"] = OF_PHASE["forward"]
