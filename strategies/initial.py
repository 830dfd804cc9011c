"""Initial weights, drawn one parameter at a time into a model that was made without them.

A subject that draws each parameter by its name (``Subject.draws``) is made on torch's "meta"
device. Strategies edit it there, except those that read weights (``Strategy.reads_weights``). Each
parameter is then drawn in float32 on the CPU, converted to its type (or packed), and moved to its
device before the next one, so that the whole model never exists in float32. Imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Draw = Callable[[str, Tensor], Tensor]
"""(name, the parameter or buffer on meta) -> its first value: float32, whole, on the CPU."""
_VALUELESS: list[bool] = []


@dataclass(frozen=True)
class Pending:
    """Initial value that a parameter waits for: the draw of ``name`` in the subject's model.

    ``version``: the parameter's version counter when it was made. ``keep``: makes the parameter
    from the value; None: unchanged.
    """

    name: str
    version: int
    keep: Callable[[Tensor], nn.Parameter] | None = None


def keyed(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator for the parameter ``name``: equal arguments give equal draws."""
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:4], "big"))  # torch uses 32 bits


@contextlib.contextmanager
def valueless() -> Iterator[None]:
    """Make tensors on meta that do not count as memory, as a prediction's on meta do."""
    _VALUELESS.append(True)
    try:
        with torch.device("meta"):
            yield
    finally:
        _VALUELESS.pop()


def is_valueless() -> bool:
    """Return whether the caller is inside ``valueless``."""
    return bool(_VALUELESS)


def storageless() -> bool:
    """Return whether new tensors have a size and no storage, as in a prediction."""
    return type(torch.empty(0)) is not Tensor


def build(subject: Any, seed: int, init: str) -> nn.Module:
    """Return the whole model of a ``strategies.subject.Subject`` on the CPU, with float32 weights
    that depend only on the arguments; ``init``: see ``Spec``."""
    if draw := subject.draws(seed, init):
        module = skeleton(subject, draw)
        fill(module, draw, "cpu")
        return module
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return subject.make()


def skeleton(subject: Any, draw: Draw) -> nn.Module:
    """Return the model without its parameters' values; buffers, which are computed, have theirs."""
    with valueless():
        module = subject.make()
    for name, p in module.named_parameters():
        if p.device.type == "meta":
            p.pending = Pending(name, p._version)
    for path, part in module.named_modules():
        for key, buffer in part._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                part._buffers[key] = draw(f"{path}.{key}".lstrip("."), buffer).to(buffer.dtype)
    return module


def pending(p: Tensor) -> Pending | None:
    """Return the value that ``p`` waits for; None if it has its value."""
    return getattr(p, "pending", None)


def waits(module: nn.Module) -> bool:
    """Return whether some parameter of ``module`` has no value yet."""
    return any(pending(p) is not None for p in module.parameters())


def kept(
    old: nn.Parameter,
    keep: Callable[[Tensor], nn.Parameter],
    hold: Callable[[Tensor], nn.Parameter] | None = None,
) -> nn.Parameter:
    """Return the parameter that ``keep`` makes of the value of ``old``: now, or when it is drawn.

    ``hold`` makes the one that waits for the draw; None: a frozen one.
    """
    if pending(old) is None:
        return keep(old.data)
    new = hold(old.data) if hold else nn.Parameter(old.data, requires_grad=False)
    new.pending = Pending(old.pending.name, new._version, keep)
    return new


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Apply ``module.to(dtype)``; parameters without a value get this type when they are drawn."""
    with valueless() if waits(module) else contextlib.nullcontext():
        module.to(dtype)


def replace(module: nn.Module, made: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter by ``made(p)``, in the order of ``module.parameters()``; one that
    several modules share stays shared."""
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
    """Return ``p`` with its value on ``device``, of ``dtype`` (None: its own), or as ``keep`` makes
    it, with the attributes that strategies set; one that has its value is returned as is.

    Raises:
        ValueError: values were written into it, and would be lost.
    """
    wanted = pending(p)
    if wanted is None:
        return p
    if p._version > wanted.version:
        raise ValueError(
            f"{wanted.name} was written to before its value was drawn: the strategy whose "
            "edit_model did so must say reads_weights = True"
        )
    values = draw(wanted.name, p)
    if wanted.keep is not None:
        return _instead(p, wanted.keep(values.to(p.dtype)))
    return _instead(p, nn.Parameter(values.to(dtype or p.dtype).to(device)))


def moved(
    p: nn.Parameter, device: torch.device | str, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """Return a parameter with its value, on ``device`` and of ``dtype`` (None: its own)."""
    values = p.detach().to(dtype or p.dtype).to(device)
    return _instead(p, nn.Parameter(values, p.requires_grad))  # codes take no gradient


def _instead(p: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    """Return ``new``, with the attributes of ``p``, which it replaces."""
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
