"""What is trained: models behind one interface, and the objectives they are trained to.

A model's name is a DiT's (``DiT-S/4:depth=24``), or names a class in a file of one's own
(``my_model.py:Mine``), a ``strategies.subject.Subject``.
"""

from __future__ import annotations

from harness.subjects import from_file
from harness.subjects.dit.subject import Dit
from strategies.base import BadInput
from strategies.subject import DataFacts, Subject

__all__ = ["kind_of", "subject_of"]


def kind_of(model: str) -> type[Subject]:
    """The class of the subject that ``model`` names.

    Raises:
        BadInput: it names a file that has none.
    """
    return from_file.load(model) if from_file.is_file(model) else Dit


def subject_of(
    model: str, data: DataFacts, *, objective: str = "epsilon", class_dropout: float = 0.1
) -> Subject:
    """The subject that ``model`` names, for data of these facts.

    Raises:
        BadInput: an unknown model, or one that does not fit its data or the objective.
    """
    subject = kind_of(model)(
        model=model, data=data, objective=objective, class_dropout=class_dropout
    )
    if objective not in subject.objectives:
        raise BadInput(
            f"model {model} cannot be trained to {objective!r}; give --objective "
            f"{' or '.join(subject.objectives)}"
        )
    subject.check()
    return subject
