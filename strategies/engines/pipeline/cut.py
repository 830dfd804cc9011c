"""A model cut into stages between its blocks: what of it a rank keeps, and what is elsewhere.

The bare model says what runs before its blocks and what behind them (``Subject``'s part "stages").
Names stay those of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from strategies import initial
from strategies.initial import Draw

__all__ = ["Cut", "Elsewhere", "cut", "cut_of", "fill"]

KEY = "stages_cut"
"""The attribute of a bare model that says how it was cut."""


@dataclass(frozen=True)
class Elsewhere:
    """A parameter that other stages have: its shape and type, and whether it trains."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class Cut:
    """Stage ``index`` of ``count``. ``owners``: the name of each parameter of the whole model, in
    its order -> its stage; ``elsewhere``: those of other stages."""

    index: int
    count: int
    owners: dict[str, int] = field(default_factory=dict)
    elsewhere: dict[str, Elsewhere] = field(default_factory=dict)

    @property
    def first(self) -> bool:
        """Whether it has what runs before the blocks."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it has what runs behind them, and the loss."""
        return self.index == self.count - 1

    def everywhere(self, module: nn.Module) -> dict[str, Any]:
        """Name -> parameter, or what is known of it, in the order of the whole model."""
        here = dict(module.named_parameters())
        return {name: here[name] if name in here else self.elsewhere[name] for name in self.owners}


def cut_of(module: nn.Module) -> Cut | None:
    """How ``module`` was cut; None where it is whole."""
    return vars(module).get(KEY)


def cut(module: nn.Module, blocks: Sequence[nn.Module], index: int, count: int) -> Cut:
    """Take from ``module`` all that belongs to other stages."""
    done = cut_of(module)
    if done is not None:
        return done
    owned = list(_parts(module, blocks, count))
    stage_of = {id(p): stage for stage, part in owned for p in part.parameters()}
    named = dict(module.named_parameters())
    made = Cut(index, count, {name: stage_of[id(p)] for name, p in named.items()})
    made.elsewhere = {
        name: Elsewhere(p.shape, p.dtype, p.requires_grad)
        for name, p in named.items()
        if made.owners[name] != index
    }
    _take_out(module, {id(part) for stage, part in owned if stage != index})
    for name in made.elsewhere:
        if name in module._parameters:
            module._parameters[name] = None
    vars(module)[KEY] = made
    return made


def _parts(
    module: nn.Module, blocks: Sequence[nn.Module], count: int
) -> Iterator[tuple[int, nn.Module]]:
    """(stage, part): blocks in equal runs, what runs before them to the first stage, what runs
    behind them to the last."""
    before, behind = module.ends
    for stage, names in ((0, before), (count - 1, behind)):
        for name in names:
            part = getattr(module, name)
            yield stage, part if isinstance(part, nn.Module) else nn.ParameterList([part])
    for place, block in enumerate(blocks):
        yield place * count // len(blocks), block


def _take_out(module: nn.Module, foreign: set[int]) -> None:
    for parent in list(module.modules()):
        for key, child in list(parent._modules.items()):
            if id(child) in foreign and isinstance(parent, nn.ModuleList):
                del parent._modules[key]  # what stays keeps its number
            elif id(child) in foreign:
                parent._modules[key] = None


def fill(
    module: nn.Module, draw: Draw, blocks: Sequence[nn.Module], place: tuple[int, int], device: Any
) -> None:
    """Cut ``module`` to stage ``place`` (index, count), and give what stays its first values. All
    are drawn, one after the other, so that every rank tells the same first weights."""
    index, count = place
    others = {
        id(p): p
        for stage, part in _parts(module, blocks, count)
        if stage != index
        for p in part.parameters()
    }

    def valued(p: nn.Parameter) -> nn.Parameter:
        if id(p) not in others:
            return initial.filled(p, draw, device)
        waiting = initial.pending(p)
        if waiting is not None:
            draw(waiting.name, p)
        return p

    initial.replace(module, valued)
    cut(module, blocks, index, count)
    module.to(device)
