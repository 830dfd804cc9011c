"""Distillation: a student with fewer blocks or another width learns from a frozen teacher.

No torch at import. ``teacher`` has the frozen model and the loss, ``files`` its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import BadInput, Slot, demand
from strategies.distillation import files
from strategies.engine import RunContext, TrainingRun
from strategies.strategy import Strategy
from strategies.subject import Subject

PREDICT = ("epsilon", "flow", "velocity")
"""Objectives under which a model returns an output that another model can learn."""


@dataclass(frozen=True, kw_only=True)
class Distill(Strategy):
    """Trains the model as the student of a frozen teacher.

    The teacher runs first in each micro-step.

    The teacher has the weights of the file ``teacher``; without a file they are drawn. It has
    ``depth`` blocks of ``width`` and ``heads`` (0: the file's, else twice the student's blocks).
    Every rank has all of it, in the type ``store``. ``weight`` is the share of the distance to the
    teacher's output in the loss; the rest is the true loss. ``feature`` times the distance of
    hidden states is added, of models of one width.
    """

    name: ClassVar[str] = "distill"
    slot: ClassVar[Slot] = Slot.LOSS
    alters: ClassVar[tuple[str, ...]] = ("forward",)
    source: ClassVar[str] = (
        "Hinton et al. 2015 (arXiv:1503.02531); of diffusion models, hidden states and blocks: "
        "Kim et al. 2023, BK-SDM (arXiv:2305.15798)"
    )
    idle: ClassVar[str] = "it trains a student; give the trained student by --model and --weights"
    values: ClassVar[dict[str, Any]] = {"store": ("fp32", "bf16")}
    least: ClassVar[dict[str, int]] = {"depth": 1, "width": 1, "heads": 1}
    ranges: ClassVar[dict[str, Any]] = {
        "weight": (lambda v: 0 <= v <= 1, "it lies in [0, 1]"),
        "feature": (lambda v: 0 <= v < float("inf"), "from 0"),
    }

    teacher: str = ""
    depth: int = 0
    width: int = 0
    heads: int = 0
    store: str = "fp32"
    weight: float = 0.5
    feature: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weight and not self.feature:
            raise ValueError(
                "weight and feature are 0, so the teacher is not used; give one above 0"
            )

    @property
    def weights(self) -> dict[str, float]:
        """Term of the loss -> its weight."""
        return {"true": 1 - self.weight, "output": self.weight, "feature": self.feature}

    def traits(self) -> frozenset[str]:
        return frozenset({"other_products"})

    def reads(self) -> tuple[str, ...]:
        return (self.teacher,) if self.teacher else ()

    def teacher_of(self, student: Subject) -> Subject:
        """Return the teacher's subject.

        Raises:
            BadInput: there is no such file, or no such model.
        """
        return files.sized(student, self.teacher, self.depth, self.width, self.heads)

    def refuses(self, launch: RunContext) -> str | None:
        if fault := super().refuses(launch):
            return fault
        student = launch.subject
        lack = student.lacks("token_blocks", "leave feature out") if self.feature else None
        if lack := student.lacks("sized") or lack:
            return lack
        if student.objective not in PREDICT:
            return (
                f"the model gives a loss of {student.objective}, and no prediction; leave this out"
            )
        try:
            teacher = self.teacher_of(student)
        except BadInput as error:
            return str(error)
        mine, theirs = student.survey.width, teacher.survey.width
        if self.feature and mine != theirs:
            return f"the student is {mine} wide, and the teacher {theirs}; leave feature out"
        return None

    def edit_model(self, module: Any, subject: Subject) -> None:
        from strategies.distillation.teacher import NAME, Hidden

        if self.feature:  # before the engine wraps the blocks
            setattr(module, NAME, Hidden(subject.blocks(module)))

    def attach(self, run: TrainingRun) -> Any:
        from strategies.distillation.teacher import NAME, Hidden, Lesson, Teacher, ends

        subject = self.teacher_of(run.subject)
        depths = run.subject.depth, subject.depth
        pairs = ends(*depths) if self.feature else []
        teacher = Teacher(subject, self.teacher, self.store, run.accelerator.device, pairs)
        captured = getattr(run.module, NAME, None) or Hidden([])
        run.supervise = Lesson(teacher, captured, self.weights)
        return teacher

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        """Return the teacher's calls and bytes; what ``Lesson`` computes is held by a test."""
        from strategies.distillation.teacher import Lesson, Teacher

        teacher: Any = run.attached.get(self.name)
        lesson: Any = run.supervise
        demand(isinstance(teacher, Teacher), "the run has no teacher")
        ours = type(lesson) is Lesson and lesson.weights == self.weights
        demand(ours, f"the loss is not that of the weights {self.weights}")
        calls, steps = teacher.calls, run.micro_steps
        demand(calls == steps, f"the teacher was called {calls} times in {steps} micro-batches")
        teacher.check(self.store)
        size = sum(p.nbytes for p in teacher.module.parameters())
        return {"teacher_forwards": calls, "teacher_bytes": size}
