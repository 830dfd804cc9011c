"""Memory snapshots of torch: what was on the card when an allocation failed, and whose it was.
The format is that of ``torch.cuda.memory._snapshot`` (torch 2.13, torch/cuda/memory.py). A snapshot
is a pickle. Here it is read by an unpickler that builds plain data only and refuses every class and
function by name, so no code of the file runs."""

from __future__ import annotations

import io
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, NoReturn

from harness.planner.oom.log import PHASES, Frame, Numbers, owner, phase_of
from harness.planner.tracing import allocator
from strategies.files import bounded_memory

LARGEST = 2**30
"""Bytes of the largest snapshot that is read."""
MOST = 20_000_000
"""Most blocks and events that are read. A file that repeats one list could have more than that."""
PIECE = 2**24
"""Bytes that are read at once."""
EXPANSION, LEAST_MEMORY, MOST_MEMORY = 64, 2**28, 2**33
"""Bytes that reading a snapshot may take: of each byte of its file, at least, and at most.
A pickle of ten bytes can ask for any number."""
ADDED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
"""Event -> sign of its bytes in what PyTorch reserved."""
LIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")
NO_STACK = "backward or C++, no Python stack"
UNKNOWN = "no stack recorded"


class _Plain(pickle.Unpickler):
    """Unpickler of dicts, lists, tuples, numbers and strings."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _whole(value: Any) -> int:
    """Return a number of bytes or an address."""
    number = int(value)
    if not 0 <= number < 2**64:
        raise ValueError(f"a size of {number.bit_length()} bits")
    return number


Block = tuple[int, Any]
"""A piece of memory in use: its bytes, and the stack that allocated it, innermost first."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Memory of one card at the failed allocation, or at the end of the recording.
    ``failed``: there is a failed allocation, with its ``frames``, outermost first. ``phases`` and
    ``lines`` are bytes by the phase and the source line that allocated them."""

    numbers: Numbers
    failed: bool
    frames: list[Frame] = field(default_factory=list)
    phases: Mapping[str, int] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)


def read(file: IO[bytes]) -> list[Snapshot]:
    """Return the cards in a file of a snapshot (``snapshots``).

    Raises:
        ValueError: it is damaged, too large, or no snapshot, or it would run code.
    """
    data = b""
    while len(data) <= LARGEST and (piece := file.read(PIECE)):
        data += piece  # a read of LARGEST bytes would allocate all of them
    if len(data) > LARGEST:
        raise ValueError(f"it has more than {LARGEST // 2**30} GiB")
    with bounded_memory(min(LEAST_MEMORY + EXPANSION * len(data), MOST_MEMORY)):
        return snapshots(load(io.BytesIO(data)))


def load(file: IO[bytes]) -> Any:
    """Return the plain data of a pickle.

    Raises:
        ValueError: it is damaged, or would run code; the text is the reason.
    """
    try:
        return _Plain(file).load()
    except (pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError,
            OverflowError, RecursionError) as error:  # fmt: skip
        if "it asks for" in str(error):
            raise ValueError(f"{error}, and only plain data is read; nothing was run") from None
        raise ValueError(f"it is cut off or damaged ({error})") from None


def snapshots(data: Any) -> list[Snapshot]:
    """Return the cards of a snapshot that hold memory; those with a failed allocation first.

    Raises:
        ValueError: the data is no snapshot.
    """
    try:
        segments = data["segments"] if isinstance(data, dict) else data
        traces = data.get("device_traces", []) if isinstance(data, dict) else []
        devices = defaultdict(list)
        for segment in segments:
            devices[int(segment["device"])].append(segment)
        of_device = dict(enumerate(traces))
        found = [
            _snapshot(device, devices[device], list(of_device.get(device, ())))
            for device in sorted({*of_device, *devices})
        ]
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"it has no segments and device_traces ({reason:.80})") from None
    held = [one for one in found if one.numbers.pool or one.failed]
    return sorted(held, key=lambda one: (not one.failed, -one.numbers.pool))


def _snapshot(device: int, segments: list[Any], trace: list[Mapping[str, Any]]) -> Snapshot:
    count = len(trace) + sum(len(segment["blocks"]) for segment in segments)
    if count > MOST:
        raise ValueError(f"{count} blocks and events")
    at = max((i for i, event in enumerate(trace) if event["action"] == "oom"), default=None)
    live: dict[int, Block] = {}
    for segment in segments:
        address = _whole(segment["address"])  # old snapshots leave out those of blocks
        for block in segment["blocks"]:
            size, history = _whole(block["size"]), block.get("history") or [{}]  # of torch 1.13
            if block["state"] in LIVE:
                frames = block.get("frames") or history[0].get("frames", ())
                live[block.get("address", address)] = size, frames
            address += size
    reserved = sum(_whole(segment["total_size"]) for segment in segments)
    after = trace[at + 1 :] if at is not None else []
    reserved -= sum(ADDED.get(event["action"], 0) * _whole(event["size"]) for event in after)
    _undo(live, after, trace[: at or 0])
    allocated, failed = sum(size for size, _ in live.values()), at is not None
    oom = trace[at] if at is not None else {}
    numbers = Numbers(
        gpu=str(device),
        requested=_segment(_whole(oom["size"])) if failed else None,
        free=_whole(oom["device_free"]) if failed else None,
        allocated=allocated,
        cached=max(0, reserved - allocated),
    )
    phases, lines = _shares(live.values())
    frames = list(reversed(_frames(oom.get("frames", ()))))
    return Snapshot(numbers=numbers, failed=failed, frames=frames, phases=phases, lines=lines)


def _segment(size: int) -> int:
    """Return the bytes that torch takes from the card for a request of ``size``.
    Its message states these. Source: torch 2.13, c10/cuda/CUDACachingAllocator.cpp,
    ``get_allocation_size``."""
    if size <= allocator.SMALL_SIZE:
        return allocator.SMALL_BUFFER
    if size < allocator.MIN_LARGE_ALLOC:
        return allocator.LARGE_BUFFER
    return -(-size // allocator.LARGE_ROUND) * allocator.LARGE_ROUND


def _undo(live: dict[int, Block], after: list[Any], before: list[Any]) -> None:
    """Turn the memory in use at the end into that before the events ``after``.
    A block that was freed meanwhile has the stack of its allocation in ``before``."""
    for event in reversed(after):
        if event["action"] == "alloc":
            live.pop(event["addr"], None)
        elif event["action"] == "free_completed":
            live[event["addr"]] = _whole(event["size"]), None
    missing = {address for address, (_, frames) in live.items() if frames is None}
    for event in reversed(before):
        if event["action"] == "alloc" and event.get("addr") in missing:
            missing.remove(event["addr"])
            live[event["addr"]] = live[event["addr"]][0], event.get("frames", ())


def _frames(frames: Iterable[Mapping[str, Any]]) -> list[Frame]:
    return [Frame(str(f["filename"]), int(f["line"]), str(f["name"])) for f in frames or ()]


def _shares(blocks: Iterable[Block]) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return bytes by phase and by source line, the largest first.
    Backward runs in a thread without a Python stack, so other blocks without one are taken for
    its."""
    stacks: dict[Any, tuple[str, str]] = {}
    phases: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for size, raw in blocks:
        if id(raw) not in stacks:
            frames, phase, line = _frames(raw), NO_STACK, ""
            if python := [frame for frame in frames if frame.path.endswith(".py")]:
                name, own = phase_of(frames), owner(python)
                phase = PHASES[name]["holds"] if name else "other code"
                line = f"{own.place} {own.name}" if own else ""
            stacks[id(raw)] = phase, line
        phase, line = stacks[id(raw)]
        phases[phase] += size
        lines[line] += size
    if set(phases) == {NO_STACK}:
        return {UNKNOWN: phases[NO_STACK]}, {}
    lines.pop("", None)
    return dict(phases.most_common()), dict(lines.most_common())
