"""What a teacher and a student must be for each other, and what does not go with them. No torch."""

from __future__ import annotations

from typing import Any

from strategies.base import BadInput
from strategies.engine import Launch
from strategies.subject import Subject

__all__ = ["STORES", "check", "refusal"]

STORES = ("fp32", "bf16", "int8", "nf4")
BESIDE = {
    "frozen_weights": "a student trains whole; leave the adapters out",
    "doubles_tokens": "a student trains whole; leave the branch out",
    "replaced_layers": "another part gives the student layers of its own; leave it out",
    "cut_samples": "a teacher would see a part of each sample; leave sp out",
    "compiled": "a graph shows no hidden states, and no loss against a teacher; leave compile out",
}
"""Trait of another part -> why it does not go with it, and the way out."""
PREDICT = ("epsilon", "flow", "velocity")
"""Objectives under which a model predicts something that another can learn from."""


def check(part: Any) -> None:
    """Refuse values of a ``Distill`` that are out of range.

    Raises:
        ValueError: names the value and what it can be.
    """
    for name in ("depth", "width", "heads"):
        value = getattr(part, name)
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} is {value!r}; a whole number, the teacher's")
    if part.store not in STORES:
        raise ValueError(f"store is {part.store!r}; one of {', '.join(STORES)}")
    if not 0 <= part.weight <= 1:
        raise ValueError(f"weight is {part.weight}; it lies in [0, 1]")
    if not 0 <= part.feature < float("inf"):
        raise ValueError(f"feature is {part.feature}; from 0")
    if not part.weight and not part.feature:
        raise ValueError("weight and feature are 0, which asks the teacher nothing; give one")
    if part.init not in ("drawn", "blocks"):
        raise ValueError(f"init is {part.init!r}; drawn, or blocks (the teacher's)")


def refusal(part: Any, launch: Launch) -> str | None:
    """Why a ``Distill`` cannot run under ``launch``, with the way out; None if it can."""
    met = next((why for trait, why in BESIDE.items() if trait in launch.traits), None)
    if met:
        return met
    student = launch.subject
    lack = student.lacks("sized")
    if not lack and part.feature:
        lack = student.lacks("token_blocks", "leave feature out")
    if lack:
        return lack
    if student.objective.partition(":")[0] not in PREDICT:
        return f"the model gives a loss of {student.objective}, and no prediction; leave this out"
    try:
        teacher = part.teacher_of(student)
    except BadInput as error:
        return str(error)
    if part.init == "blocks":
        return _no_beginning(student, teacher) or _masked(launch)
    return None


def _masked(launch: Launch) -> str | None:
    if "masked_weights" not in launch.traits:
        return None
    return (
        "its blocks would take the place of weights that were pruned, whose masks were chosen from "
        "drawn ones; leave init=blocks out, or the pruning"
    )


def _no_beginning(student: Subject, teacher: Subject) -> str | None:
    """Why the student cannot begin with blocks of the teacher."""
    mine, theirs = student.dimensions, teacher.dimensions
    if (mine.width, mine.heads) != (theirs.width, theirs.heads):
        return (
            f"the teacher's blocks are {theirs.width} wide with {theirs.heads} heads, and the "
            f"student's {mine.width} with {mine.heads}; leave init=blocks out"
        )
    if mine.depth > theirs.depth:
        return (
            f"the student has {mine.depth} blocks to begin, and the teacher {theirs.depth} to "
            "choose from; leave init=blocks out"
        )
    return None
