"""Students that learn from nobody, from another, or by another loss than they say."""

from __future__ import annotations

from strategies.distillation.distill import Distill
from strategies.distillation.teacher import Lesson
from tests.made.stubs.parts import Table, nothing

ATTACH = Distill.attach


def then(change):
    """Attached as ever, and changed by ``change(teacher, lesson)``."""

    def attach(self, trained):
        teacher = ATTACH(self, trained)
        change(teacher, trained.supervise)
        return teacher

    return attach


def weighed(**weights):
    """Other weights in the loss than the recipe's."""

    def change(teacher, lesson):
        lesson.weights = {**lesson.weights, **weights}

    return then(change)


def trains(teacher, lesson):
    teacher.module.requires_grad_(True)


def moves(teacher, lesson):
    first = next(p for p in teacher.module.parameters() if p.ndim > 1)
    teacher.after_step = lambda: first.add_(1e-3)


def remembers(teacher, lesson):
    ask, said = teacher.ask, []

    def once(*given):
        if not said:
            said.append(ask(*given))
        return said[0]

    teacher.ask = once


def twice(teacher, lesson):
    ask = teacher.ask
    teacher.ask = lambda *given: (ask(*given), ask(*given))[1]


def taught_by(kind):
    def attach(self, trained):
        teacher = ATTACH(self, trained)
        trained.supervise = kind(teacher, trained.supervise.captured, self.weights)
        return teacher

    return attach


class Shown(Lesson):
    """Takes the loss against the teacher, and differentiates the true one."""

    def __call__(self, true_loss, predict, conditions):
        super().__call__(true_loss, predict, conditions)
        return true_loss(predict).mean()


def with_store(store):
    def attach(self, trained):
        return ATTACH(Distill(store=store), trained)

    return attach


PLAIN, FEATURE = "single+distill", "single+distill:feature=0.5"
LOST: Table = {
    "no teacher": (PLAIN, Distill, "attach", nothing),
    "a teacher that takes gradients": (PLAIN, Distill, "attach", then(trains)),
    "a teacher that moves": (PLAIN, Distill, "attach", then(moves)),
    "a teacher that is asked once for all": (PLAIN, Distill, "attach", then(remembers)),
    "a teacher that is asked twice": (PLAIN, Distill, "attach", then(twice)),
    "the true loss alone": (PLAIN, Distill, "attach", weighed(output=0.0)),
    "the teacher's answer alone": (PLAIN, Distill, "attach", weighed(true=0.0)),
    "both in another proportion": (PLAIN, Distill, "attach", weighed(true=0.4)),
    "a loss that is taken and not differentiated": (PLAIN, Distill, "attach", taught_by(Shown)),
    "no hidden states": (FEATURE, Distill, "attach", weighed(feature=0.0)),
    "a teacher in float32, not bfloat16": (
        "single+distill:store=bf16", Distill, "attach", with_store("fp32"),
    ),
}  # fmt: skip
