"""Sampling with a distilled student instead of its teacher, and the match of their blocks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import BadInput, Parity, Slot, demand
from strategies.distillation import files
from strategies.engine import RunContext, TrainingRun
from strategies.evidence.states import count
from strategies.strategy import Strategy
from strategies.subject import Subject
from strategies.workloads import SAMPLE


@dataclass(frozen=True, kw_only=True)
class Distilled(Strategy):
    """Samples with a student of the named model.

    The named model is the teacher.

    The student has the weights of the file ``student``; without a file they are drawn. It has
    ``depth`` blocks of ``width`` and ``heads`` (0: the file's). Rows without this strategy sample
    with the teacher. The distance of the student's samples is thus that to the teacher's.
    """

    name: ClassVar[str] = "distilled"
    slot: ClassVar[Slot] = Slot.ADAPT
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("forward", "model")
    source: ClassVar[str] = "Kim et al. 2023, BK-SDM (arXiv:2305.15798), section 4"
    workloads: ClassVar[tuple[str, ...]] = (SAMPLE,)
    idle: ClassVar[str] = "a student draws; train one with distill, or take --workload sample"
    plainest: ClassVar[str] = "distilled:depth=1"

    student: str = ""
    depth: int = 0
    width: int = 0
    heads: int = 0

    def __post_init__(self) -> None:
        for name in ("depth", "width", "heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}; a whole number, the student's")

    def reads(self) -> tuple[str, ...]:
        return (self.student,) if self.student else ()

    def stands_in(self, subject: Subject) -> tuple[Subject, str]:
        found = files.sized(subject, self.student, self.depth, self.width, self.heads)
        return found, self.student

    def refuses(self, launch: RunContext) -> str | None:
        lack = launch.subject.lacks("sized")
        if lack:
            return lack
        if not (self.student or self.depth or self.width):
            return "it names no student; give student=FILE, or the depth of a drawn one"
        try:
            self.stands_in(launch.subject)
        except BadInput as error:
            return str(error)
        return None

    def observe(self, trained: TrainingRun) -> AbstractContextManager[Any]:
        if "compiled" in trained.launch.traits:
            return contextlib.nullcontext()  # a watched graph would run uncompiled
        return _blocks_run(trained)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        """Return the parameters of the model in place, and the number of blocks that each of its
        calls ran."""
        subject = trained.subject  # the student, if it is in place; its size is kept
        student = files.sized(subject, self.student, self.depth, self.width, self.heads)
        depth, parameters = student.dimensions.depth, student.parameters
        found = count(trained.module.parameters())
        alike = subject.dimensions == student.dimensions and found == parameters
        demand(
            alike,
            f"the sampled model is {subject.name} with {found} weights, expected {student.name}",
        )
        if self.student:
            self._has_the_files(trained)
        ran = self.note(trained)
        if ran is None:
            return {"parameters": found, "blocks": len(trained.blocks())}
        calls = trained.observed.micro_steps
        demand(
            len(ran) == depth * calls,
            f"{len(ran)} blocks ran in {calls} calls of a model of {depth} blocks",
        )
        return {"parameters": found, "blocks_a_call": len(ran) // calls}

    def _has_the_files(self, trained: TrainingRun) -> None:
        """Check that each weight in place that is a plain float equals the file's, within
        rounding."""
        import torch

        from strategies.evidence.rules import relative_error

        draw, own = files.weights(trained.subject, self.student), dict(_named(trained.subject))
        floats = {
            name: p
            for name, p in trained.module.named_parameters()
            if name in own
            and own[name].shape == p.shape
            and type(p.data) is torch.Tensor
            and p.is_floating_point()
        }
        demand(bool(floats), f"no weight of the model can be compared with {self.student}")
        for name, p in floats.items():
            off = relative_error(p.detach().cpu().double(), draw(name, own[name]).double())
            demand(
                off < 1e-2, f"{name} differs by {off:.2g} (relative) from that of {self.student}"
            )


def _named(subject: Subject) -> Any:
    import torch

    with torch.device("meta"):
        return subject.make().named_parameters()


@contextlib.contextmanager
def _blocks_run(trained: TrainingRun) -> Iterator[list[int]]:
    """Yield a list that gets an element for each block that ran."""
    ran: list[int] = []
    handles = [b.register_forward_hook(lambda *_: ran.append(1)) for b in trained.blocks()]
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()


# ---- matching blocks ----


def chosen(depth: int, of: int) -> list[int]:
    """Return ``depth`` indices below ``of``, evenly spaced, with the first and the last.

    A student begins with these blocks of its teacher. If ``depth`` exceeds ``of``, some occur
    twice.
    """
    return [round(i * (of - 1) / max(1, depth - 1)) for i in range(depth)]


def ends(depth: int, of: int) -> list[int]:
    """Return, for each of ``depth`` blocks, the index of the block at the same relative depth of
    ``of``.

    The last matches the last.
    """
    return [max(0, round((i + 1) * of / depth) - 1) for i in range(depth)]


def renamed(name: str, prefixes: Sequence[str], blocks: Sequence[int]) -> str:
    """Return the name of the parameter ``name`` in the model that ``blocks`` were chosen from.

    A parameter is in a block if its name begins with one of the ``prefixes`` ("blocks") and a
    number.
    """
    for prefix in prefixes:
        found = re.match(rf"{re.escape(prefix)}\.(\d+)\.(.*)", name, re.DOTALL)
        if found:
            return f"{prefix}.{blocks[int(found[1])]}.{found[2]}"
    return name
