"""A model cut into stages between its blocks: what of it a rank keeps, and what is elsewhere.

The bare model says what runs before its blocks and what behind them (``Subject``'s part "stages"),
or what passes between them (``passage``): then every stage runs what is in front of its blocks, has
the weights of that ("shared"), and the gradients of these are sums over all stages. Names stay
those of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from strategies import initial
from strategies.engines.pipeline.passage import Passage, Slots
from strategies.engines.pipeline.schedules import dealt
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
    these run, ``depth``: how many blocks there are; ``blocks``: those of the runs that are here;
    ``owners``: the name of each parameter of the whole model, in its order -> its stage, of those
    that are ``shared`` by all the one that tells of them; ``elsewhere``: those that are not here.
    ``passage``: what passes between blocks of a model that runs them in a forward of its own;
    ``slots``: where blocks stand in the model."""

    index: int
    homes: tuple[int, ...]
    depth: int
    blocks: dict[int, list[nn.Module]] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    elsewhere: dict[str, Elsewhere] = field(default_factory=dict)
    passage: Passage | None = None
    slots: Slots | None = None

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

    def bounds(self, run: int) -> tuple[int, int]:
        """The numbers of a run's first block and of that behind its last."""
        return dealt(self.depth, len(self.homes))[run]

    def tells(self, name: str) -> bool:
        """Whether a parameter is this stage's to tell of: one that all have is told once."""
        return self.owners[name] == self.index

    def everywhere(self, module: nn.Module) -> dict[str, Any]:
        """Name -> parameter, or what is known of it, in the order of the whole model."""
        here = dict(module.named_parameters())
        return {name: here[name] if name in here else self.elsewhere[name] for name in self.owners}

    def parts(self, module: nn.Module, run: int) -> list[nn.Module]:
        """What a run that is here uses of ``module``, and no other stage: its blocks, and at an end
        what lies there."""
        if self.passage is None:
            return [part for found, part in _parts(module, self.blocks, self.end) if found == run]
        behind = self._behind(module) if run == self.end else []
        return [*self.blocks[run], *([nn.ParameterList(behind)] if behind else [])]

    def _behind(self, module: nn.Module) -> list[nn.Parameter]:
        of_blocks = {id(p) for run in self.blocks.values() for b in run for p in b.parameters()}
        named = ((n, p) for n, p in module.named_parameters() if id(p) not in of_blocks)
        return [p for name, p in named if name not in self.shared]

    def common(self, module: nn.Module) -> list[nn.Parameter]:
        """The trained parameters that all stages have."""
        return [p for n, p in module.named_parameters() if n in self.shared and p.requires_grad]


def cut_of(module: nn.Module) -> Cut | None:
    """How ``module`` was cut; None where it is whole."""
    return vars(module).get(KEY)


def cut(module: nn.Module, blocks: Sequence[nn.Module], index: int, homes: tuple[int, ...]) -> Cut:
    """Take from ``module`` all that belongs to other stages than ``index``; ``homes`` has the stage
    of each run of ``blocks``."""
    done = cut_of(module)
    if done is not None:
        return done
    runs = {n: own for n, own in _dealt(blocks, len(homes)).items() if homes[n] == index}
    made = Cut(index, homes, len(blocks), runs, passage=passage_of(module))
    made.owners, made.shared = _owners(module, blocks, homes)
    made.elsewhere = {
        name: Elsewhere(p.shape, p.dtype, p.requires_grad)
        for name, p in module.named_parameters()
        if made.owners[name] != index and name not in made.shared
    }
    made.slots = Slots(module, blocks)
    for name in made.elsewhere:
        path, _, key = name.rpartition(".")
        module.get_submodule(path)._parameters[key] = None
    foreign = {id(block) for block in blocks} - {id(b) for own in runs.values() for b in own}
    _take_out(module, foreign)
    _take_out(module, {id(child) for child in _emptied(module, made)})
    vars(module)[KEY] = made
    return made


def passage_of(module: nn.Module) -> Passage | None:
    """What passes between the blocks of a model that does not say what is at its ends."""
    return None if hasattr(module, "ends") else module.passage()


def _dealt(blocks: Sequence[nn.Module], runs: int) -> dict[int, list[nn.Module]]:
    there = dealt(len(blocks), runs)
    return {n: list(blocks[first:end]) for n, (first, end) in enumerate(there)}


def _parts(
    module: nn.Module, runs: Mapping[int, Sequence[nn.Module]], end: int
) -> Iterator[tuple[int, nn.Module]]:
    """(run, part): blocks, what runs before them with the first run, what runs behind them with
    the last."""
    before, behind = getattr(module, "ends", ((), ()))
    for run, names in ((0, before), (end, behind)):
        for part in (getattr(module, name) for name in names if run in runs):
            yield run, part if isinstance(part, nn.Module) else nn.ParameterList([part])
    for run, blocks in runs.items():
        for block in blocks:
            yield run, block


def _owners(
    module: nn.Module, blocks: Sequence[nn.Module], homes: tuple[int, ...]
) -> tuple[dict[str, int], frozenset[str]]:
    """The stage of each parameter of a whole model, by name, and the names of those that all have.
    What is used behind the blocks alone, or never, is the last run's."""
    known, runs = passage_of(module), _dealt(blocks, len(homes))
    dealt = _parts(module, runs, len(homes) - 1)
    stage_of = {id(p): homes[run] for run, part in dealt for p in part.parameters()}
    early = frozenset() if known is None else known.early
    owners = {
        name: homes[0] if name in early else stage_of.get(id(p), homes[-1])
        for name, p in module.named_parameters()
    }
    return owners, early


def _emptied(module: nn.Module, made: Cut) -> Iterator[nn.Module]:
    """Parts all of whose parameters are other stages', and which hold no blocks."""
    for name, child in module.named_children():
        own = [other for other in made.owners if other.startswith(f"{name}.")]
        holds = any(parent in made.slots.orders for parent in child.modules())
        if own and not holds and made.elsewhere.keys() >= set(own):
            yield child


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
    owners, shared = _owners(module, blocks, homes)
    others = {
        id(p)
        for name, p in module.named_parameters()
        if owners[name] != index and name not in shared
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
