"""A model before its first weights are there, and how they come: one parameter after the other.

A subject that draws each parameter by its name (``Subject.draws``) is made on torch's "meta"
device, where a tensor has a shape and a type and no bytes. Strategies edit it there, but for those
that must see weights (``Strategy.reads_weights``). Then each parameter is drawn, float32 on the
CPU, kept as the edited model wants it (its type, packed), and put where it will live before the
next one is drawn: the whole model in float32 is never there, unless that is what is trained.

Imports torch: import it where torch is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Draw = Callable[[str, Tensor], Tensor]
"""(name, the parameter or buffer on meta) -> its first value: float32, whole, on the CPU."""
_VALUELESS: list[bool] = []


@dataclass(frozen=True)
class Pending:
    """What a parameter without a value waits for: the draw of ``name`` (its name in the model as
    the subject made it), kept as the parameter that ``keep`` makes of it; None: as it is.
    ``version`` counts what was written to it when it was made. ``instead``: what makes of the drawn
    value the one that takes its place; None: it stays. ``like``: what is drawn, where that is of
    another shape than the parameter; None: the parameter."""

    name: str
    version: int
    keep: Callable[[Tensor], nn.Parameter] | None = None
    instead: Callable[[Tensor], Tensor] | None = None
    like: Tensor | None = None


def keyed(seed: int, name: str) -> torch.Generator:
    """A generator on the CPU for the parameter ``name`` alone: equal arguments, equal draws,
    whatever was drawn before and wherever it will live."""
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:4], "big"))  # torch's uses 32 bits


@contextlib.contextmanager
def valueless() -> Iterator[None]:
    """Tensors are made on meta, and no memory is meant (a prediction's GPU is on meta too)."""
    _VALUELESS.append(True)
    try:
        with torch.device("meta"):
            yield
    finally:
        _VALUELESS.pop()


def is_valueless() -> bool:
    """Whether ``valueless`` holds now."""
    return bool(_VALUELESS)


def storageless() -> bool:
    """Whether tensors that are made now have a size and no storage: in a prediction, where nobody
    wants their values."""
    return type(torch.empty(0)) is not Tensor


def skeleton(make: Callable[[], nn.Module], draw: Draw) -> nn.Module:
    """The model without its parameters' values; buffers, which are computed, have theirs."""
    with valueless():
        module = make()
    for name, p in module.named_parameters():
        if p.device.type == "meta":
            p.pending = Pending(name, p._version)
    for path, part in module.named_modules():
        for key, buffer in part._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                part._buffers[key] = draw(f"{path}.{key}".lstrip("."), buffer).to(buffer.dtype)
    return module


def pending(p: Tensor) -> Pending | None:
    """What ``p`` waits for; None where it has its value."""
    return getattr(p, "pending", None)


def waits(module: nn.Module) -> bool:
    """Whether some parameter of ``module`` has no value yet."""
    return any(pending(p) is not None for p in module.parameters())


def hand_on(
    old: nn.Parameter,
    new: nn.Parameter,
    keep: Callable[[Tensor], nn.Parameter],
    like: Tensor | None = None,
) -> None:
    """``new``, which takes the place of ``old``, waits for the same draw, and ``keep`` makes a
    parameter of it; ``like`` is what is drawn, where ``new`` is of another shape."""
    new.pending = Pending(old.pending.name, new._version, keep, old.pending.instead, like)


def instead(p: nn.Parameter, other: Callable[[Tensor], Tensor]) -> None:
    """Have ``other`` of the value that ``p`` waits for take its place: drawn it is all the same,
    and told as the first weight that every row of a suite draws."""
    p.pending = dataclasses.replace(p.pending, instead=other)


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """``module.to(dtype)``; what has no value yet will be of this type when it is drawn."""
    with valueless() if waits(module) else contextlib.nullcontext():
        module.to(dtype)


def replace(module: nn.Module, made: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Put ``made(p)`` in the place of each parameter, in the order of ``module.parameters()``; one
    that several modules share stays one."""
    done: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for part in module.modules():
        for key, p in part._parameters.items():
            if p is None:
                continue
            if id(p) not in done:
                done[id(p)] = (p, made(p))
            part._parameters[key] = done[id(p)][1]


def filled(
    p: nn.Parameter, draw: Draw, device: torch.device | str, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """``p`` with its value, on ``device`` and of ``dtype`` (None: its own), unless it is kept in
    another way. What strategies wrote on it stays; one that has its value is returned as it is.

    Raises:
        ValueError: somebody wrote values into it, which would be lost.
    """
    wanted = pending(p)
    if wanted is None:
        return p
    if p._version > wanted.version:
        raise ValueError(
            f"{wanted.name} was written to before its value was drawn: the strategy whose "
            "edit_model did so must say reads_weights = True"
        )
    values = draw(wanted.name, p if wanted.like is None else wanted.like)
    if wanted.instead is not None:
        values = wanted.instead(values)
    if wanted.keep is not None:
        return _instead(p, wanted.keep(values.to(p.dtype)))
    return _instead(p, nn.Parameter(values.to(dtype or p.dtype).to(device)))


def moved(
    p: nn.Parameter, device: torch.device | str, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """A parameter that has its value, on ``device`` and of ``dtype`` (None: its own)."""
    values = p.detach().to(dtype or p.dtype).to(device)
    return _instead(p, nn.Parameter(values, p.requires_grad))  # codes can take no gradient


def _instead(p: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    """``new``, with what was written on ``p``, in whose place it goes."""
    new.requires_grad_(p.requires_grad)
    for key, value in vars(p).items():
        if key != "pending":
            vars(new).setdefault(key, value)
    return new


def fill(
    module: nn.Module,
    draw: Draw,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> None:
    """Give each parameter of ``module`` that waits its value: see ``filled``."""
    replace(module, lambda p: filled(p, draw, device, dtype))
