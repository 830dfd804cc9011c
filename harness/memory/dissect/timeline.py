"""Every storage of one step, in order: what lives at each instant, and who made it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from harness.anatomy import Trace
from harness.dissect.modules import Stack, alike
from harness.portrait import CATEGORIES, Kept, Lump, Timeline
from strategies.base import Trained

__all__ = ["Film"]

SAMPLES = 400
LUMPS = 12
OURS = ("/harness/", "/strategies/", "/deepspeed/", "/accelerate/", "/torch/optim/")
NOT_OURS = ("/harness/dissect/", "/harness/anatomy.py")


class Film(Trace):
    """A trace that also notes for each storage the module and the source line that made it."""

    def __init__(
        self, trained: Trained, device_type: str, stack: Stack, left_out: Iterable[Any] = ()
    ) -> None:
        self.stack, self.ops_run = stack, 0
        self.makers: dict[int, tuple[str, str]] = {}
        self.at: dict[int, int] = {}
        self.marks: list[list[Any]] = []
        super().__init__(trained, device_type, left_out)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:  # what the saved-tensors hooks do
            self.ops_run += 1
        return super().__torch_dispatch__(func, types, args, kwargs)

    def enter(self, phase: str) -> None:
        """Begin a phase, and remember at which operation."""
        self._catch_up()
        self.marks.append([self.ops_run, phase])
        super().enter(phase)

    def _see(self, tensor: Any, made_by: str, category: str | None = None) -> None:
        self._catch_up()
        before = len(self.blocks)
        super()._see(tensor, made_by, category)
        if len(self.blocks) > before and self.phase != "before":
            self.makers[before] = (self.stack.now(), _site())

    def _catch_up(self) -> None:
        """Date the events since the last look: frees come between two operations."""
        for index in range(len(self.at), len(self.events)):
            self.at[index] = self.ops_run

    def finish(self) -> None:
        """The step is over: date what is left."""
        self._catch_up()

    # -- what was seen --

    def _totals(self) -> list[tuple[int, ...]]:
        """Bytes of each category after each event."""
        place = {name: index for index, name in enumerate(CATEGORIES)}
        sums, found = [0] * len(CATEGORIES), []
        for sign, index in self.events:
            block = self.blocks[index]
            sums[place[self._category(block)]] += sign * block.size
            found.append(tuple(sums))
        return found

    def timeline(self) -> Timeline:
        """The step in at most 400 samples, the highest instant among them."""
        totals = self._totals()
        peak = max(range(len(totals)), key=lambda i: sum(totals[i]))
        width = max(1, -(-self.ops_run // SAMPLES))
        fullest: dict[int, int] = {}
        for index, sums in enumerate(totals):
            if self.blocks[self.events[index][1]].phase == "before" and not self.at[index]:
                fullest[0] = index
                continue
            column = self.at[index] // width
            best = fullest.get(column)
            if best is None or sum(sums) > sum(totals[best]):
                fullest[column] = index
        kept = [fullest[column] for column in sorted(fullest)]
        block = self.events[peak][1]
        module, site = self.makers.get(block, ("", ""))
        return Timeline(
            op=[self.at[i] for i in kept],
            bytes={name: [totals[i][j] for i in kept] for j, name in enumerate(CATEGORIES)},
            marks=[*self.marks, [self.ops_run, "end"]],
            peak_op=self.at[peak],
            peak_phase=self._phase_at(peak),
            peak_maker=self.blocks[block].made_by,
            peak_module=module,
            peak_site=site,
        )

    def _phase_at(self, event: int) -> str:
        passed = [phase for at, phase in self.marks if at <= self.at[event]]
        return passed[-1] if passed else "before"

    def lumps(self) -> list[Lump]:
        """What lived at the peak, alike things together, the largest first."""
        totals = self._totals()
        peak = max(range(len(totals)), key=lambda i: sum(totals[i]))
        sizes: Counter[tuple[str, str, str]] = Counter()
        counts: Counter[tuple[str, str, str]] = Counter()
        for index in self._alive(peak + 1):
            block = self.blocks[index]
            module = alike(self.makers.get(index, ("", ""))[0])
            key = (self._category(block), block.made_by.removeprefix("aten."), module)
            sizes[key] += block.size
            counts[key] += 1
        return [
            Lump(category=c, maker=m, module=where, count=counts[c, m, where], bytes=size)
            for (c, m, where), size in sizes.most_common(LUMPS)
        ]

    def _alive(self, events: int) -> set[int]:
        live: set[int] = set()
        for sign, index in self.events[:events]:
            (live.add if sign > 0 else live.discard)(index)
        return live

    def kept(self, saved: dict[int, tuple[str, int]]) -> list[Kept]:
        """Activations alive when the first backward begins, by the module that made them."""
        boundary = next(at for at, phase in self.marks if phase == "backward")
        events = sum(1 for index in range(len(self.events)) if self.at[index] <= boundary)
        made: Counter[str] = Counter()
        for index in self._alive(events):
            block = self.blocks[index]
            if block.phase == "forward" and self._category(block) == "activations":
                made[alike(self.makers[index][0])] += block.size
        held: Counter[str] = Counter()
        for module, size in saved.values():
            held[alike(module)] += size
        copies = Counter(alike(name) for name, _ in self.stack.module.named_modules())
        rows = [
            Kept(module=name, count=copies[name] or 1, made=made[name], saved=held[name])
            for name in {*made, *held}
        ]
        return sorted(rows, key=lambda row: -max(row.made, row.saved))


def _site() -> str:
    """The innermost source line of the project, or of an engine, that asked for an operation."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in OURS) and not any(part in name for part in NOT_OURS):
            parts = name.split("/")
            return f"{'/'.join(parts[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
