"""Distillation: a student of fewer blocks or another width learns from a frozen teacher."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Slot, demand
from strategies.distillation import files, fitting, matching
from strategies.engine import Launch, Trained
from strategies.strategy import Strategy
from strategies.subject import Subject

__all__ = ["Distill"]


@dataclass(frozen=True, kw_only=True)
class Distill(Strategy):
    """Trains the model as the student of a frozen teacher, which answers first in each micro step.

    The teacher has the weights of the file ``teacher`` (without one, drawn ones), of ``depth``
    blocks of ``width`` and ``heads`` (0: the file's, else twice the student's blocks), ``store``d
    on every rank. The loss is ``weight`` of the distance to its prediction and the rest of the true
    one, and ``feature`` times that of hidden states. ``init=blocks``: with its blocks, evenly.
    """

    name: ClassVar[str] = "distill"
    slot: ClassVar[Slot] = Slot.LOSS
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("forward",)
    source: ClassVar[str] = (
        "Hinton et al. 2015 (arXiv:1503.02531); of diffusion models, hidden states and blocks: "
        "Kim et al. 2023, BK-SDM (arXiv:2305.15798)"
    )
    scaffold: ClassVar[tuple[str, ...]] = ("hidden_states.",)
    idle: ClassVar[str] = (
        "it trains a student; give what it left by --weights, or draw with distilled beside the "
        "teacher"
    )

    teacher: str = ""
    depth: int = 0
    width: int = 0
    heads: int = 0
    store: str = "fp32"
    weight: float = 0.5
    feature: float = 0.0
    init: str = "drawn"

    def __post_init__(self) -> None:
        fitting.check(self)

    @property
    def weights(self) -> dict[str, float]:
        """Term of the loss -> its weight."""
        return {"true": 1 - self.weight, "output": self.weight, "feature": self.feature}

    def traits(self) -> frozenset[str]:
        return frozenset({"other_products"})

    def reads(self) -> tuple[str, ...]:
        return (self.teacher,) if self.teacher else ()

    def requires(self, launch: Launch) -> tuple[str, ...]:
        return ("bitsandbytes",) if self.store == "nf4" else ()

    def teacher_of(self, student: Subject) -> Subject:
        """The teacher's subject.

        Raises:
            BadInput: there is no such file, or no such model.
        """
        return files.sized(student, self.teacher, self.depth, self.width, self.heads, times=2)

    def refuses(self, launch: Launch) -> str | None:
        return fitting.refusal(self, launch)

    def edit_model(self, module: Any, subject: Subject) -> None:
        from strategies.distillation.begun import begin
        from strategies.distillation.hidden import NAME, Hidden, hear

        teacher = self.teacher_of(subject)
        if self.init == "blocks":
            begin(module, subject, teacher, self.teacher)
        if self.feature:
            blocks, (depth, width, *_) = subject.blocks(module), subject.dimensions
            heard = Hidden(depth, width, teacher.dimensions.width, subject.dtype(module))
            hear(module, blocks, heard)
            module.add_module(NAME, heard)

    def attach(self, trained: Trained) -> Any:
        from strategies.distillation import begun
        from strategies.distillation.hidden import NAME, Hidden
        from strategies.distillation.lesson import Lesson
        from strategies.distillation.teacher import Teacher

        subject = self.teacher_of(trained.subject)
        depths = trained.subject.dimensions.depth, subject.dimensions.depth
        pairs = matching.ends(*depths) if self.feature else []
        teacher = Teacher(subject, self.teacher, self.store, trained.accelerator.device, pairs)
        if self.init == "blocks":
            teacher.began = begun.apart(trained, teacher.module, depths[1])
        heard = getattr(trained.module, NAME, None) or Hidden.deaf()
        trained.supervise = Lesson(teacher, heard, self.weights)
        return teacher

    def observe(self, trained: Trained) -> AbstractContextManager[Any]:
        from strategies.distillation.shown import watched

        return watched(trained.supervise) if trained.supervise else nullcontext()

    def evidence(self, trained: Trained) -> dict[str, Any]:
        from strategies.distillation.shown import shown
        from strategies.distillation.teacher import Teacher

        teacher = trained.attached.get(self.name)
        demand(isinstance(teacher, Teacher), "no teacher is kept")
        calls, steps = teacher.calls, trained.micro_steps
        demand(calls == steps, f"the teacher was asked {calls} times in {steps} micro steps")
        facts = {"teacher_forwards": calls, **teacher.facts(self.store)}
        if self.init == "blocks":
            demand(teacher.began is not None, "the student did not begin with its teacher's blocks")
            facts["blocks_begin_away"] = float(f"{teacher.began:.2g}")
        moments = self.note(trained)
        return facts if moments is None else facts | shown(moments, teacher, self.weights)
