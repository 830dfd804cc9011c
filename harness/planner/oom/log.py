"""Out-of-memory errors of a traceback or log, read line by line: their numbers, stacks and phases.
The patterns of the messages are those by which a run's outcome is found
(``harness.launch.outcome``). A log of any size takes little memory."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from harness.launch import outcome
from strategies.files import own_table, printable

TABLE: Mapping[str, Any] = own_table(Path(__file__).with_name("causes.yaml"))
PHASES: Mapping[str, Mapping[str, Any]] = TABLE["phases"]
STACKS = {name: re.compile("|".join(one["frames"])) for name, one in PHASES.items()}
"""Phase -> pattern of the frames of its stacks."""
MARKS = {name: re.compile("|".join(one["lines"])) for name, one in reversed(PHASES.items())
         if "lines" in one}  # fmt: skip
MARKS[""] = re.compile("After initializing (?:optimizer states|ZeRO optimizer)")
"""Phase -> lines of trainers and of DeepSpeed that tell it, of a process that left no stack."""


# ---- numbers of a message ----
# The messages are those of torch 1.13 to 2.13 (c10/cuda/CUDACachingAllocator.cpp, ``malloc``), of
# its cudaMallocAsync backend, of MPS, NCCL, numpy and the kernel.


SIZE = r"(\d[\d.,]{0,20}) ?([kKMGTPE]?i?B|bytes)\b"
PATTERNS = {
    "requested": (r"[Tt]ried to allocate {}", r"Requested *: {}", r"Unable to allocate {}",
                  r"Failed to CUDA \w*alloc(?: async)? {}", r"unable to mmap {}"),
    # torch 2.1 spells it "capacty".
    "capacity": (r"total capaci?ty of {}", r"{} total capacity", r"Device limit *: {}",
                 r"max allowed: {}"),
    "free": (r"of which {} is free", r"{} free;", r"Free \(according to CUDA\) *: {}"),
    "process": (r"this process has {} memory in use", r"anon-rss:{}"),
    "allocated": (r"{} is allocated by PyTorch", r"{} already allocated",
                  r"Currently allocated *: {}", r"MPS allocated: {}"),
    "cached": (r"{} is reserved by PyTorch but unallocated", r"{} cached\)"),
    "reserved": (r"{} reserved in total by PyTorch",),
    "elsewhere": (r"other allocations: {}",),
    "limit": (r"{} allowed;",),
}  # fmt: skip
"""Field of ``Numbers`` -> the forms of its number. ``reserved`` and ``elsewhere`` give others: a
Mac states no free memory."""
OTHER = re.compile(rf"Process (\d{{1,12}}) has {SIZE} memory in use")
DEVICE = re.compile(r"(?:GPU|[NX]PU|device) (\d+)\b", re.I)
WRAPPED = 2**64
"""Bytes to which a negative size wraps around in an unsigned number."""
SLACK = 2**27
"""Bytes by which the sizes in a message may disagree, because it rounds them."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Bytes that a message or snapshot states, or None.

    - ``requested``: the allocation that failed.
    - ``allocated``, ``cached``: PyTorch's tensors, and memory that it reserved beyond them.
    - ``process``: of this process on the GPU, or its host memory if the kernel ended it.
    - ``others``: of each other process, by its number.
    - ``limit``: what the process may take, by ``set_per_process_memory_fraction``.
    - ``below``: bytes by which the stated free memory lies below zero (an underflow).
    """

    gpu: str = ""
    requested: int | None = None
    capacity: int | None = None
    free: int | None = None
    process: int | None = None
    allocated: int | None = None
    cached: int | None = None
    limit: int | None = None
    below: int = 0
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """True if PyTorch's own numbers are there."""
        return self.allocated is not None and self.requested is not None

    @property
    def beside(self) -> int:
        """Bytes of other processes."""
        return sum(self.others.values())

    @property
    def pool(self) -> int:
        """Bytes that PyTorch reserved."""
        return (self.allocated or 0) + (self.cached or 0)

    @property
    def total(self) -> int:
        """Bytes of the card; of a snapshot, what PyTorch reserved and what was free."""
        return self.capacity or self.pool + (self.free or 0)

    @property
    def context(self) -> int:
        """Bytes of this process outside of PyTorch's pool: the CUDA context and libraries."""
        return max(0, (self.process or 0) - self.pool)

    @property
    def unseen(self) -> int:
        """Bytes of the card that the message does not assign."""
        if not self.capacity:
            return 0
        used = max(self.process or 0, self.pool) + self.beside + (self.free or 0)
        return max(0, self.total - used)


def parse_size(text: str, unit: str) -> int:
    """Return bytes of ``1.70`` or ``1,70`` and a unit; all units are powers of 1024.
    MPS writes GB for GiB. Source: torch 2.13, aten/src/ATen/mps/MPSAllocator.h, ``format_size``."""
    whole, mark, part = text.rstrip(".,").replace(",", ".").rpartition(".")
    number = float(f"{whole.replace('.', '')}{mark}{part}")
    power = " KMGTPE".find(unit[0].upper()) if unit[0] not in "bB" else 0
    return int(number * 1024**power)


def numbers_of(text: str) -> Numbers:
    """Return the numbers of a message, whose lines are joined by spaces."""
    found: dict[str, int | None] = {}
    for name, forms in PATTERNS.items():
        stated = (re.search(form.format(SIZE), text, re.I) for form in forms)
        found[name] = next((parse_size(one[1], one[2]) for one in stated if one), None)
    reserved = found.pop("reserved")
    if reserved is not None and found["allocated"] is not None:
        found["cached"] = max(0, reserved - found["allocated"])
    elsewhere = found.pop("elsewhere")
    if elsewhere is not None and found["free"] is None and found["capacity"]:
        found["free"] = max(0, found["capacity"] - elsewhere - (found["allocated"] or 0))
    below = WRAPPED - (found["free"] or 0)
    if 0 <= below < WRAPPED // 2:  # a driver of an integrated GPU reports more in use than it has
        found |= {"free": 0, "below": below}
    gpu = DEVICE.search(text)
    others = {pid: parse_size(*size) for pid, *size in OTHER.findall(text)}
    numbers = Numbers(gpu=gpu[1] if gpu else "", others=others, **found)
    own = [(size, pid) for pid, size in others.items() if size + SLACK >= numbers.pool]
    if not own or not numbers.known or numbers.process is not None:
        return numbers
    # In a container torch does not recognise its own number. This process is the one that holds
    # the least beyond PyTorch's own memory.
    size, pid = min(own)
    others = {name: held for name, held in others.items() if name != pid}
    return replace(numbers, process=size, others=others)


# ---- stacks ----


class Frame(NamedTuple):
    """One frame: file, line, function, and its source line if known."""

    path: str
    line: int
    name: str
    code: str = ""

    @property
    def text(self) -> str:
        """The last three parts of the path, the function and the code, for the rules."""
        path = "/".join(self.path.replace("\\", "/").split("/")[-3:])
        return f"{path} {self.name} {self.code}"

    @property
    def place(self) -> str:
        """File and line, for a table."""
        return f"{self.text.split(' ')[0]}:{self.line}"


LIBRARY = re.compile(r"-packages/torch/|/pytorch/torch/|contextlib\.py|^\?\?|^<|\.(?:cpp|h)$")
"""Paths of torch's own frames, which say little about whose tensor it is."""


def phase_of(frames: Iterable[Frame], line: str = "") -> str:
    """Return the phase of a stack, or of a message without a stack; empty if unknown."""
    text = "\n".join([*(frame.text for frame in frames), f" {line}"])
    return next((name for name, pattern in STACKS.items() if pattern.search(text)), "")


def owner(frames: Iterable[Frame]) -> Frame | None:
    """Return the innermost frame outside of torch; the innermost of all if there is none.
    ``frames`` begin with the innermost, as in a snapshot."""
    frames = list(frames)
    own = (frame for frame in frames if not LIBRARY.search(frame.path.replace("\\", "/")))
    return next(own, frames[0] if frames else None)


# ---- errors ----


GPU, PINNED, HOST, KILLED = "gpu", "pinned", "host", "killed"
WORKER, SHM, PAGED, SCHEDULED = "worker", "shm", "paged", "scheduled"
MORE_GPU = re.compile(
    r"would exceed allowed memory|(?i:cuda out of memory)|MPS backend out of memory"
    r"|\b(?:NPU|MUSA|MLU|HPU) out of memory"
    r"|(?:UR_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)|OUT_OF_DEVICE_MEMORY"
    r"|RESOURCE_EXHAUSTED: .*(?:[Oo]ut of memory|Ran out of memory|allocat)"
    r"|MODULE:PT_DEVMEM Allocation failed|EL0004|EE9999.*[Mm]emory|NPU.*507899"
)
"""Messages of the cudaMallocAsync backend, of Macs and of other accelerators, which no run of
Headroom has."""
SYSTEMS = (
    (WORKER, re.compile(r"DataLoader worker .*killed by signal: Killed"
                        r"|^(?!.*raise ).*Worker data receiving interrupted")),  # of DALI
    (SHM, re.compile(r"DataLoader worker .*Bus error|unable to allocate shared memory\(shm\)|"
                     + outcome.SHM_FULL.pattern)),
    # The words are translated; the number is not. Rust writes "(os error 1455)".
    (PAGED, re.compile(r"\bWinError (?:8|14)\b|\b(?:WinError|os error) 14(?:50|53|55)\b")),
    (SCHEDULED, re.compile(r"oom[-_ ]kill event|srun: error: .*Out Of Memory"
                           r"|\bOUT_OF_MEMORY\b(?! \()|OOM Killed|OOMKilled"
                           r"|CONSTRAINT_MEMCG|Memory cgroup out of memory"
                           r"|[Ee]xceeded (?:job |step )?memory limit"
                           r"|TERM_MEMLIMIT|job killed: mem")),
)  # fmt: skip
"""Kinds of errors that a system reports, with their messages; the first that is found counts."""
KILL = re.compile(
    outcome.SIGKILLED.pattern
    + r"|exits with return code = -9\b|^Killed$|: +\d+ Killed\b|^zsh: killed|: Killed process \d+"
    + r"|(?:\u5df2\u6740\u6b7b|\u5df2\u6bba\u6b7b|\u5f37\u5236\u7d42\u4e86|Get\u00f6tet)$"
    + r"|\boom-kill:|oom_kill_process|[Ee]xit code:? 137\b|died with <Signals.SIGKILL"
)
"""A process that the kernel ended, as launchers, shells, also translated ones, and it write it."""
CERTAIN = re.compile(r"oom-kill|[Oo]ut of memory: Killed")
PINS = re.compile(
    outcome.PINNING.pattern
    + r"|\.to\([^)]*['\"]cpu['\"][^)]*non_blocking *= *True|flat_cpu_memory|cpu_buffer|pinned"
    + r"|weigh\w*_to_device|device\(['\"]cpu['\"]\)"
)
"""Frames that pin host memory: a copy to the CPU that does not block, block swap's copies, for a
full GPU would be told with numbers, and DeepSpeed's flat buffers."""
RANK = re.compile(r"\[rank(\d{1,6})\]:? ?")
FRAME = re.compile(
    r"File \"?(?P<path>[^\"]{1,400}?)\"?, line (?P<line>\d+), in (?P<name>\S+)"
    r"|(?:File )?(?P<path2>[^\s\"]{1,400}\.py):(?P<line2>\d+),? in *(?P<name2>[\w.<>]*)"
)
POINTED = re.compile(r"^[\s|\u2502]*(?:-+>|\u2771) *\d+[\s|\u2502]*(.*?)[\s|\u2502]*$")
"""The marked source line of a traceback by rich or IPython."""
STEPS = re.compile(r"\d%\|.*?\| *(\d{1,12})/\d+ ")
BARS = ("tep", "poch", "raining")
"""Parts of the names of progress bars that count steps."""
LOSS = re.compile(r"loss['\"]?[=: ] *[\d.]")
CODE = re.compile(r"\b(?:except|raise|isinstance)\b.*Error")
"""Source lines of a stack that name an error."""
WORDS = (
    "inError", "os error", "us error", "IGBUS", "OUT_OF_", "EXHAUSTED", "OOM", "MEMLIMIT",
    "No space left", "it code", "emory", "MEMORY", ".py", "Traceback", "= -9", ": -9", "KILL",
    "illed", "oom", "bad_alloc", "alloc ", "CUBLAS", "CUDNN", "NVML", "cudaError", "Errno",
    "Assertion", "device-side", "Loading ", "alidation", "enerating ", "aving ", "ach", "omput",
    "ncoding ", "initializing", "creating fp", "interrupted",
    "\u5df2", "\u5f37\u5236", "Get\u00f6tet",
)  # fmt: skip
"""Parts of lines that matter; all other lines are skipped early, because a log can be large."""
WIDTH, END = 4096, 512
"""Characters of a line that are read from its begin, and of a longer one from its end."""
FRAMES, MESSAGE, GOES_ON, ERRORS = 400, 2000, 12, 64
"""Most frames of a stack, characters and further lines of a message, and errors that are kept."""


@dataclass
class Failure:
    """One error: its kind, message, line number in the file, rank, stack, and progress before it.
    ``frames`` begin with the outermost. ``steps`` are those that the progress bar had counted;
    ``trained`` is True if a loss had been printed."""

    kind: str
    text: str
    at: int = 0
    rank: str = ""
    frames: list[Frame] = field(default_factory=list)
    steps: int = 0
    trained: bool = False
    mark: str = ""

    @property
    def line(self) -> str:
        """The message's first line."""
        return self.text.split("\n")[0]

    @property
    def numbers(self) -> Numbers:
        """Numbers of the message."""
        return numbers_of(" ".join(self.text.split()))

    @property
    def phase(self) -> str:
        """Phase of the training, by the stack, the message or the last line that tells it."""
        return phase_of(self.frames) or phase_of((), self.line) or self.mark

    @property
    def certain(self) -> bool:
        """True unless the process was ended by a signal whose sender is not named."""
        return self.kind != KILLED or bool(CERTAIN.search(self.text))


_ORDER = {SCHEDULED: 1, KILLED: 2}
"""Kinds that may be consequences of others, or that name the cause of a kill."""


def scan(lines: Iterable[str]) -> Log:
    """Return the errors of a log."""
    log = Log()
    for line in lines:
        log.take(line)
    if log.asserted:
        log.failures = [one for one in log.failures if "NOT_INITIALIZED" not in one.text]
    return log


class Log:
    """Errors of a file in their order, and how many lines it has; while it is read, the stacks and
    the messages that may go on, by rank.
    ``asserted`` is the line of another error of the GPU, after which each call fails."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.lines, self.asserted = 0, ""
        self.frames: dict[str, deque[Frame]] = defaultdict(lambda: deque(maxlen=FRAMES))
        self.pending: set[str] = set()
        self.open: dict[str, Failure] = {}
        self.bar, self.trained, self.mark = "", False, ""

    @property
    def first(self) -> Failure | None:
        """The first error; a kill, which may be a consequence, only without another."""
        return min(self.failures, key=lambda one: (_ORDER.get(one.kind, 0), one.at), default=None)

    def take(self, line: str) -> None:
        """Read one line."""
        self.lines += 1
        if "%|" in line and any(word in line for word in BARS):
            self.bar, self.mark = line, ""
        if "loss" in line and LOSS.search(line):
            self.trained, self.mark = True, ""
        if self.open or self.pending or any(word in line for word in WORDS):
            line = line if len(line) <= WIDTH else f"{line[:WIDTH]} {line[-END:]}"
            line = printable(line).rstrip()
            found = RANK.search(line)
            rank, text = found[1] if found else "", RANK.sub("", line)
            if kind := self._kind(text, rank):
                self._begin(kind, text, rank)
            elif not self._frame(text, rank) and rank in self.open:
                self._go_on(text, rank)
            if outcome.ASSERTED.search(text):
                self.asserted = self.asserted or text.strip()
            self.mark = next((name for name, mark in MARKS.items() if mark.search(text)), self.mark)

    def _kind(self, text: str, rank: str) -> str:
        """Return the kind of error that a line reports; empty for none."""
        if outcome.HARMLESS.search(text) or CODE.search(text):
            return ""
        if outcome.PINNED.search(text):
            return PINNED
        if outcome.GPU_OOM.search(text) or MORE_GPU.search(text):
            last = " ".join(frame.text for frame in list(self.frames[rank])[-6:])
            stated = "OutOfMemoryError" in text or "ried to allocate" in text
            return PINNED if PINS.search(last) and not stated else GPU
        for kind, pattern in SYSTEMS:
            if pattern.search(text):
                return kind
        if KILL.search(text.strip()):
            return KILLED
        return HOST if outcome.HOST_OOM.search(text) else ""

    def _begin(self, kind: str, text: str, rank: str) -> None:
        first = (kind, rank, text[:MESSAGE])
        again = [one for one in self.failures if (one.kind, one.rank, one.line) == first]
        self.pending.discard(rank)
        last = self.open.get(rank)
        if last and last.kind == kind and "ried to allocate" not in last.text:
            self._go_on(text, rank)
            return
        for one in again:  # some launchers print the message first, and then the stack
            one.frames = one.frames or list(self.frames[rank])
        if again or len(self.failures) >= ERRORS:
            return
        bar = STEPS.search(self.bar)
        found = Failure(kind, text[:MESSAGE], self.lines, rank, list(self.frames[rank]))
        found.steps, found.trained = int(bar[1]) if bar else 0, self.trained
        found.mark = self.mark
        self.open[rank] = found
        self.failures.append(found)

    def _go_on(self, text: str, rank: str) -> None:
        """Add a line to an open message, up to a limit."""
        failure = self.open[rank]
        if failure.text.count("\n") >= GOES_ON:
            del self.open[rank]
        else:
            failure.text += f"\n{text[:MESSAGE]}"

    def _frame(self, text: str, rank: str) -> bool:
        """Read a line of a stack; return False if it is none."""
        if "Traceback (most recent call last)" in text:
            self.frames[rank].clear()
            self.open.pop(rank, None)
            return True
        if match := FRAME.search(text):
            path, line, name = (match[key] or match[f"{key}2"] for key in ("path", "line", "name"))
            self.frames[rank].append(Frame(path, int(line[:9]), name))
            self.pending.add(rank)
            self.open.pop(rank, None)
            return True
        pointed = POINTED.match(text)
        numbered = re.match(r"[\s|\u2502]*\d* *[|\u2502]|\s*\d+ ", text)
        if rank in self.pending and self.frames[rank] and (pointed or not numbered):
            code = (pointed[1] if pointed else text).strip()
            self.frames[rank][-1] = self.frames[rank][-1]._replace(code=code[:300])
            self.pending.discard(rank)
        return bool(pointed)
