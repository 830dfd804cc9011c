"""Trainable models behind one interface (subjects), and their training objectives.

A model's name is one of these:
- a DiT (``DiT-S/4:depth=24``, ``DiT-S/4:tokens=8192``);
- a model of the diffusers library (``flux-dev``, ``diffusers:CLASS``);
- a class or function in a user's file (``my_model.py:Mine``).
"""

from __future__ import annotations

from harness.subjects import own_module
from harness.subjects.dit.subject import Dit, TokenDit
from harness.subjects.dit.subject import is_named as is_of_tokens
from harness.subjects.library import families
from harness.subjects.library.subject import Library
from harness.subjects.names import suggestion
from strategies.base import BadInput
from strategies.subject import DataFacts, Shaping, Subject

__all__ = ["kind_of", "subject_of", "usual_objective"]


def kind_of(model: str) -> type[Subject]:
    """Return the class of the subject that ``model`` names.

    Raises:
        BadInput: the file has no subject, or no model has the name.
    """
    if own_module.is_file(model):
        return own_module.load(model)
    if families.is_named(model):
        return Library
    if is_of_tokens(model):
        return TokenDit
    if model.startswith("DiT"):
        return Dit
    raise BadInput(f"unknown model {model!r}; {suggestion(model)}")


def usual_objective(model: str, config: str = "") -> str:
    """Return the objective that ``model``, with the ``config`` of a spec, is trained on if none is
    given."""
    kind = kind_of(model)
    if kind is Library:
        return families.find(model, config).family.objectives[0]
    return kind.objectives[0]


def subject_of(
    model: str,
    data: DataFacts,
    *,
    objective: str = "epsilon",
    class_dropout: float = 0.1,
    shaping: Shaping | None = None,
) -> Subject:
    """Return the subject that ``model`` names, for data of these facts and with the spec's shaping.

    Raises:
        BadInput: an unknown model, or one that does not fit its data or the objective.
    """
    subject = kind_of(model).of(
        shaping or Shaping(),
        model=model,
        data=data,
        objective=objective,
        class_dropout=class_dropout,
    )
    if objective not in subject.objectives:
        raise BadInput(
            f"model {model} cannot be trained to {objective!r}; give --objective "
            f"{' or '.join(subject.objectives)}"
        )
    subject.check()
    return subject
