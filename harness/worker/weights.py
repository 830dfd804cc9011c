"""Weights out of a file, given one by one where a model would draw its first ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from harness import ROOT
from harness.spec import Spec, SpecError
from strategies.initial import Draw
from strategies.subject import Subject

__all__ = ["FromFile", "check", "first_values", "put"]


@dataclass
class FromFile:
    """The draw of a parameter that a file has: its value there. What the file has not is drawn:
    training froze it (a table of positions), so it is not among the averages."""

    name: str
    state: dict[str, Tensor]
    drawn: Draw
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = frozenset(self.state)

    def __call__(self, name: str, like: Tensor) -> Tensor:
        if name not in self.names:
            return self.drawn(name, like)
        # Each is asked for once: what was given need not stay in memory.
        return _fitting(self.name, name, self.state.pop(name), like)


def read(spec: Spec, subject: Subject) -> dict[str, Tensor]:
    """Parameters by name, as ``train --averaged`` wrote them.

    Raises:
        SpecError: the file is none, or holds nothing.
    """
    try:
        state = subject.load(ROOT / spec.weights)
    except Exception as error:  # every format has errors of its own
        raise SpecError(f"weights is {spec.weights}: {error}; train it anew") from None
    if not state:
        raise SpecError(f"weights is {spec.weights}, which holds no tensor; train it anew")
    return dict(state)


def first_values(spec: Spec, subject: Subject) -> Draw | None:
    """How each parameter gets its value: out of the spec's file where it has one, else as the
    subject draws it; None where the subject is built whole."""
    drawn = subject.draws(spec.seed, spec.init)
    if not spec.weights or drawn is None:
        return drawn
    return FromFile(spec.weights, read(spec, subject), drawn)


def put(spec: Spec, subject: Subject, module: nn.Module) -> None:
    """The same for a model that was built whole: its values are replaced by the file's."""
    if not spec.weights:
        return
    state, parameters = read(spec, subject), dict(module.named_parameters())
    _agree(spec, frozenset(state), module)
    for name, value in state.items():
        parameters[name].data.copy_(_fitting(spec.weights, name, value, parameters[name]))


def check(spec: Spec, draw: Draw, module: nn.Module) -> None:
    """That the file and ``module`` have the same trained parameters.

    Raises:
        SpecError: it is of another model; names a parameter.
    """
    if isinstance(draw, FromFile):
        _agree(spec, draw.names, module)


def _agree(spec: Spec, names: frozenset[str], module: nn.Module) -> None:
    mine = {name: p.requires_grad for name, p in module.named_parameters()}
    lacking = (name for name, free in mine.items() if free and name not in names)
    odd = [*sorted(names - mine.keys()), *lacking]
    if odd:
        raise SpecError(
            f"weights is {spec.weights}, of another model than {spec.model}: {odd[0]} is on one "
            "side only; give its own --model and --objective"
        )


def _fitting(file: str, name: str, value: Tensor, like: Tensor) -> Tensor:
    if value.shape != like.shape:
        raise SpecError(
            f"weights is {file}: {name} has the shape {list(value.shape)}, and the model's has "
            f"{list(like.shape)}; give its own --model, --data and --objective"
        )
    return value.float()
