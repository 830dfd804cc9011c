"""Timeline of one step: live storages at each instant, and the modules that allocated them."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from harness.memory.memory_breakdown import Kept, Lump, Timeline
from harness.memory.record import MEASURED, Storage, measured_name
from harness.memory.tracer import BEFORE, Tracer
from strategies.engine import TrainingRun

# ---- modules ----


def alike(name: str) -> str:
    """Return the name shared by a module's siblings: ``blocks.3.attn`` is ``blocks.*.attn``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


class Stack:
    """The running module, by name; empty outside the model.

    In forward it is known by hooks. In backward it is derived from autograd's sequence numbers:
    each module call owns a range of the node numbers created in forward. A node that runs in
    backward lies in the range of the innermost call that created it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._open: list[tuple[str, int]] = []
        self._ranges: list[tuple[int, int, str]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[Stack]:
        """Track every module's forward within this context."""
        handles = []
        for name, part in self.module.named_modules():
            if name:
                entering = functools.partial(self._entering, name)
                handles.append(part.register_forward_pre_hook(entering, prepend=True))
                handles.append(part.register_forward_hook(self._left, always_call=True))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def now(self) -> str:
        """Return the running module; in backward the module whose forward created the running
        node."""
        if self._open:
            return self._open[-1][0]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        number = node._sequence_nr()
        inside = [(end - start, name) for start, end, name in self._ranges if start <= number < end]
        return min(inside)[1] if inside else ""

    def _entering(self, name: str, *_: Any) -> None:
        self._open.append((name, torch.autograd._get_sequence_nr()))

    def _left(self, *_: Any) -> None:
        name, start = self._open.pop()
        self._ranges.append((start, torch.autograd._get_sequence_nr(), name))


SAMPLES = 400
LUMPS = 12
OURS = ("/harness/", "/strategies/", "/deepspeed/", "/accelerate/", "/torch/optim/")
NOT_OURS = "/harness/memory/"


class TimelineTracer(Tracer):
    """Tracer that also records the module and source line of each allocation."""

    def __init__(self, run: TrainingRun, device_type: str, stack: Stack) -> None:
        super().__init__({device_type: "device"})
        self.places = None  # the page shows all live storages, in any placement
        self.stack, self.buckets, self.ops_run = stack, run.engine.buckets, 0
        self.modules: dict[int, str] = {}
        self.at: list[int] = []
        self.marks: list[list[Any]] = []

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count the operation."""
        self.ops_run += 1
        super().ran(func, args, kwargs, out)

    def enter(self, phase: str) -> None:
        """Begin a phase and record its first operation."""
        self.catch_up()
        if phase != BEFORE:
            self.marks.append([self.ops_run, phase])
        super().enter(phase)

    def site(self) -> tuple[str, str | None]:
        return _site() if self.phase != BEFORE else "", None

    def _add(self, storage: Storage) -> int:
        self.catch_up()
        index = super()._add(storage)
        if self.phase != BEFORE:
            self.modules[index] = self.stack.now()
        return index

    def catch_up(self) -> None:
        """Record the operation count for each event since the last call: storages are freed between
        two operations."""
        self.at += [self.ops_run] * (len(self.record.events) - len(self.at))

    # -- results --

    def _category(self, index: int) -> str:
        return measured_name(self.record.storages[index].kind, self.buckets)

    def _totals(self) -> list[tuple[int, ...]]:
        """Return the bytes of each category after each event of the step.

        Later events are omitted: the indices of a step live until the next step.
        """
        place = {name: index for index, name in enumerate(MEASURED)}
        sums, totals = [0] * len(MEASURED), []
        for sign, index in self.record.events[: len(self.at)]:
            sums[place[self._category(index)]] += sign * self.record.storages[index].size
            totals.append(tuple(sums))
        return totals

    def timeline(self) -> Timeline:
        """Return the step in at most 400 samples, the peak among them."""
        totals, events = self._totals(), self.record.events
        peak = max(range(len(totals)), key=lambda i: sum(totals[i]))
        width = max(1, -(-self.ops_run // SAMPLES))
        fullest: dict[int, int] = {}
        for event, sums in enumerate(totals):
            column, storage = self.at[event] // width, self.record.storages[events[event][1]]
            best = fullest.get(column)
            standing = storage.phase == BEFORE and not self.at[event]  # before the first operation
            if standing or best is None or sum(sums) > sum(totals[best]):
                fullest[column] = event
        shown, top = [fullest[column] for column in sorted(fullest)], events[peak][1]
        passed = [phase for at, phase in self.marks if at <= self.at[peak]]
        return Timeline(
            op=[self.at[i] for i in shown],
            bytes={name: [totals[i][j] for i in shown] for j, name in enumerate(MEASURED)},
            marks=[*self.marks, [self.ops_run, "end"]],
            peak_op=self.at[peak],
            peak_phase=passed[-1] if passed else BEFORE,
            peak_maker=self.record.storages[top].op,
            peak_module=self.modules.get(top, ""),
            peak_site=self.record.storages[top].site,
        )

    def lumps(self) -> list[Lump]:
        """Return the storages alive at the peak, similar ones together, the largest first."""
        totals = self._totals()
        peak = max(range(len(totals)), key=lambda i: sum(totals[i]))
        groups: dict[tuple[str, str, str], list[int]] = {}
        for index in self.record.alive(peak + 1):
            storage, module = self.record.storages[index], alike(self.modules.get(index, ""))
            key = (self._category(index), storage.op.removeprefix("aten."), module)
            groups.setdefault(key, []).append(storage.size)
        found = [
            Lump(category=c, maker=m, module=where, count=len(sizes), bytes=sum(sizes))
            for (c, m, where), sizes in groups.items()
        ]
        return sorted(found, key=lambda lump: -lump.bytes)[:LUMPS]

    def kept(self) -> list[Kept]:
        """Return activations alive when the first backward begins, by the module that allocated
        them."""
        boundary = next(at for at, phase in self.marks if phase == "backward")
        made_by: Counter[str] = Counter()
        for index in self.record.alive(sum(at <= boundary for at in self.at)):
            storage = self.record.storages[index]
            if storage.phase == "forward" and self._category(index) == "activations":
                made_by[alike(self.modules[index])] += storage.size
        copies = Counter(alike(name) for name, _ in self.stack.module.named_modules())
        return [
            Kept(module=name, count=copies[name] or 1, made=size)
            for name, size in made_by.most_common()
        ]


def _site() -> str:
    """Return the innermost source line of the project or an engine that called the operation."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in OURS) and not any(part in name for part in NOT_OURS):
            parts = name.split("/")
            return f"{'/'.join(parts[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
