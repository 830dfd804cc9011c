"""A model cut into stages between its blocks: what of it a rank keeps, and what is elsewhere.

The bare model says what runs before its blocks and what behind them (``Subject``'s part "stages").
Names stay those of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """What stage ``index`` keeps. ``homes``: the stage of each run of blocks, in the order in which
    these run; ``blocks``: those of the runs that are here; ``owners``: the name of each parameter
    of the whole model, in its order -> its stage; ``elsewhere``: those of other stages."""

    index: int
    homes: tuple[int, ...]
    blocks: dict[int, list[nn.Module]] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    elsewhere: dict[str, Elsewhere] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Stages."""
        return max(self.homes) + 1

    @property
    def end(self) -> int:
        """The last run of blocks, behind which are what leaves them and the loss."""
        return len(self.homes) - 1

    @property
    def last(self) -> bool:
        """Whether the last run is here."""
        return self.end in self.blocks

    def everywhere(self, module: nn.Module) -> dict[str, Any]:
        """Name -> parameter, or what is known of it, in the order of the whole model."""
        here = dict(module.named_parameters())
        return {name: here[name] if name in here else self.elsewhere[name] for name in self.owners}

    def parts(self, module: nn.Module, run: int) -> list[nn.Module]:
        """What a run that is here uses of ``module``: its blocks, and at an end what lies there."""
        return [part for found, part in _parts(module, self.blocks, self.end) if found == run]


def cut_of(module: nn.Module) -> Cut | None:
    """How ``module`` was cut; None where it is whole."""
    return vars(module).get(KEY)


def cut(module: nn.Module, blocks: Sequence[nn.Module], index: int, homes: tuple[int, ...]) -> Cut:
    """Take from ``module`` all that belongs to other stages than ``index``; ``homes`` has the stage
    of each run of ``blocks``."""
    done = cut_of(module)
    if done is not None:
        return done
    owned = list(_owned(module, blocks, homes))
    stage_of = {id(p): stage for stage, part in owned for p in part.parameters()}
    named = dict(module.named_parameters())
    runs = {n: own for n, own in _dealt(blocks, len(homes)).items() if homes[n] == index}
    made = Cut(index, homes, runs, {name: stage_of[id(p)] for name, p in named.items()})
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


def _dealt(blocks: Sequence[nn.Module], runs: int) -> dict[int, list[nn.Module]]:
    """Equal runs of blocks."""
    size = len(blocks) // runs
    return {n: list(blocks[n * size : (n + 1) * size]) for n in range(runs)}


def _parts(
    module: nn.Module, runs: Mapping[int, Sequence[nn.Module]], end: int
) -> Iterator[tuple[int, nn.Module]]:
    """(run, part): blocks, what runs before them with the first run, what runs behind them with
    the last."""
    before, behind = module.ends
    for run, names in ((0, before), (end, behind)):
        for part in (getattr(module, name) for name in names if run in runs):
            yield run, part if isinstance(part, nn.Module) else nn.ParameterList([part])
    for run, blocks in runs.items():
        for block in blocks:
            yield run, block


def _owned(
    module: nn.Module, blocks: Sequence[nn.Module], homes: tuple[int, ...]
) -> Iterator[tuple[int, nn.Module]]:
    """(stage, part) of a whole model."""
    for run, part in _parts(module, _dealt(blocks, len(homes)), len(homes) - 1):
        yield homes[run], part


def _take_out(module: nn.Module, foreign: set[int]) -> None:
    for parent in list(module.modules()):
        for key, child in list(parent._modules.items()):
            if id(child) in foreign and isinstance(parent, nn.ModuleList):
                del parent._modules[key]  # what stays keeps its number
            elif id(child) in foreign:
                parent._modules[key] = None


def fill(
    module: nn.Module,
    draw: Draw,
    blocks: Sequence[nn.Module],
    place: tuple[int, tuple[int, ...]],
    device: Any,
) -> None:
    """Cut ``module`` to stage ``place`` (index, homes), and give what stays its first values. All
    are drawn, one after the other, so that every rank tells the same first weights."""
    index, homes = place
    others = {
        id(p): p
        for stage, part in _owned(module, blocks, homes)
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
    cut(module, blocks, index, homes)
    module.to(device)
