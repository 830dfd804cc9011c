"""A model cut into stages between its blocks, and the values that pass between its blocks.

A model says what runs before and behind its blocks (``Subject``'s part "stages"). Any other model
is run once on tensors without memory (``passage``), which finds the values that later blocks read.
Each stage of such a model also runs what is in front of the blocks: it has the weights of that
("shared"), whose gradients are sums over all stages. Names stay those of the whole model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from strategies import initial
from strategies.engines.pipeline.schedules import dealt
from strategies.initial import Draw
from strategies.subject import Subject

KEY = "stages_cut"
"""Attribute of a bare model that holds its ``Cut``."""


@dataclass(frozen=True)
class Elsewhere:
    """A parameter of another stage."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class Cut:
    """The part of a model that stage ``index`` keeps.

    ``homes``: stage of each run of blocks, in the order in which they run. ``depth``: blocks of the
    whole model. ``blocks``: run -> blocks, of this stage. ``owners``: parameter name, in the whole
    model's order -> its stage; for a ``shared`` parameter, which all stages have, the stage that
    counts it. ``elsewhere``: parameters of other stages. ``passage``: values between the blocks of
    a model without the part "ends". ``slots``: attributes that hold the blocks."""

    index: int
    homes: tuple[int, ...]
    depth: int
    blocks: dict[int, list[nn.Module]] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    elsewhere: dict[str, Elsewhere] = field(default_factory=dict)
    passage: Passage | None = None
    slots: Slots = None  # type: ignore[assignment]  # set once the blocks are cut

    @property
    def count(self) -> int:
        """Stages."""
        return max(self.homes) + 1

    @property
    def end(self) -> int:
        """The last run of blocks, which the output and the loss follow."""
        return len(self.homes) - 1

    @property
    def last(self) -> bool:
        """True if this stage has the last run."""
        return self.end in self.blocks

    def bounds(self, run: int) -> tuple[int, int]:
        """Return (first block, end) of a run."""
        return dealt(self.depth, len(self.homes))[run]

    def tells(self, name: str) -> bool:
        """Return True if this stage counts a parameter; a shared one is counted once."""
        return self.owners[name] == self.index

    def global_parameters(self, module: nn.Module) -> dict[str, Any]:
        """Return name -> parameter, or its ``Elsewhere``, in the order of the whole model."""
        here = dict(module.named_parameters())
        return {name: here[name] if name in here else self.elsewhere[name] for name in self.owners}

    def parts(self, module: nn.Module, run: int) -> list[nn.Module]:
        """Return the modules that only this run uses: its blocks, and at an end of the model what
        lies there."""
        if self.passage is None:
            return [part for found, part in _parts(module, self.blocks, self.end) if found == run]
        behind = self._behind(module) if run == self.end else []
        return [*self.blocks[run], *([nn.ParameterList(behind)] if behind else [])]

    def _behind(self, module: nn.Module) -> list[nn.Parameter]:
        of_blocks = {id(p) for run in self.blocks.values() for b in run for p in b.parameters()}
        named = ((n, p) for n, p in module.named_parameters() if id(p) not in of_blocks)
        return [p for name, p in named if name not in self.shared]

    def common(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the trained parameters that all stages have."""
        return [p for n, p in module.named_parameters() if n in self.shared and p.requires_grad]


def cut_of(module: nn.Module) -> Cut | None:
    """Return the ``Cut`` of ``module``; None if it is whole."""
    return vars(module).get(KEY)


def cut(module: nn.Module, blocks: Sequence[nn.Module], index: int, homes: tuple[int, ...]) -> Cut:
    """Remove the parts of ``module`` that belong to other stages than ``index``; ``homes`` has the
    stage of each run of ``blocks``."""
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
    """Return the passage of a model without the part "ends", else None."""
    return None if hasattr(module, "ends") else module.passage()


def _dealt(blocks: Sequence[nn.Module], runs: int) -> dict[int, list[nn.Module]]:
    there = dealt(len(blocks), runs)
    return {n: list(blocks[first:end]) for n, (first, end) in enumerate(there)}


def _parts(
    module: nn.Module, runs: Mapping[int, Sequence[nn.Module]], end: int
) -> Iterator[tuple[int, nn.Module]]:
    """Yield (run, part): blocks, the modules before them with the first run, and those behind them
    with the last."""
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
    """Return the stage of each parameter of a whole model by name, and the names of shared ones. A
    parameter that is used only behind the blocks, or never, belongs to the last run."""
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
    """Yield children that hold no blocks and have only parameters of other stages."""
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
    """Cut ``module`` to the stage ``place`` (index, homes) and set its first values. All values are
    drawn in order, so every rank draws the same weights."""
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


Value = tuple[int, int]
"""(block, index of a tensor that it returns)."""


class Unfit(ValueError):
    """The blocks of a model cannot be cut into stages; the message says why."""


class Shaped(NamedTuple):
    """Shape and type of a tensor that a block returns."""

    shape: torch.Size
    dtype: torch.dtype


class Output(NamedTuple):
    """Structure of a block's output. Each leaf is a ``Shaped``, or a value that is no tensor."""

    spec: TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, out: Any) -> Output:
        leaves, spec = tree_flatten(out)
        kept = (Shaped(x.shape, x.dtype) if torch.is_tensor(x) else x for x in leaves)
        return cls(spec, tuple(kept))


@dataclass(frozen=True)
class Passage:
    """Values that pass between the blocks of a model.

    ``outputs`` of each block. ``alive``: for each block the values of earlier blocks that it, or
    anything later, reads; one more entry for what follows the last block. ``early``: names of the
    parameters that are used outside of blocks before the last block has run."""

    outputs: tuple[Output, ...]
    alive: tuple[tuple[Value, ...], ...]
    early: frozenset[str]

    def shaped(self, border: int) -> tuple[Shaped, ...]:
        """Return shape and type of each value that passes in front of a block."""
        return tuple(self.outputs[block].leaves[leaf] for block, leaf in self.alive[border])


class Slots:
    """The attributes of a model that hold its blocks, which others can replace for a while."""

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module]) -> None:
        wanted = {id(block): number for number, block in enumerate(blocks)}
        self.of: dict[int, tuple[nn.Module, str]] = {}
        self.orders: dict[nn.Module, tuple[str, ...]] = {}
        for parent in module.modules():
            for key, child in parent._modules.items():
                if id(child) in wanted:
                    self.of[wanted[id(child)]] = (parent, key)
                    self.orders[parent] = tuple(parent._modules)

    @contextlib.contextmanager
    def hold(self, standing: Mapping[int, nn.Module]) -> Iterator[None]:
        """Replace the blocks of these numbers within the context."""
        before = {parent: parent._modules for parent in self.orders}
        now = {parent: dict(modules) for parent, modules in before.items()}
        for number, module in standing.items():
            parent, key = self.of[number]
            now[parent][key] = module
        for parent, order in self.orders.items():
            parent.__dict__["_modules"] = {k: now[parent][k] for k in order if k in now[parent]}
        try:
            yield
        finally:
            for parent, modules in before.items():
                parent.__dict__["_modules"] = modules


class Watched(nn.Module):
    """A block whose inputs are passed to ``begins`` and whose output is replaced by that of
    ``ends``."""

    def __init__(
        self,
        block: nn.Module,
        ends: Callable[[Any], Any],
        begins: Callable[[Any], None] = lambda given: None,
    ) -> None:
        super().__init__()
        self.block, self.begins, self.ends = block, begins, ends

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, *given: Any, **named: Any) -> Any:
        """Run the block."""
        self.begins((given, named))
        return self.ends(self.block(*given, **named))


# ---- taken once ----


def passage_between(subject: Subject) -> Passage:
    """Return the values that pass between the blocks of ``subject`` for one sample, cached in this
    process.

    Raises:
        Unfit: its blocks cannot be cut into stages.
    """
    return _of(subject)


@functools.lru_cache(maxsize=16)
def _of(subject: Subject) -> Passage:
    return taken(subject, lambda: subject.example("cpu"))


def usual(
    subject: Subject, dtype: torch.dtype, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]
) -> bool:
    """Return True if samples and type are those of ``passage_between``, except for their values."""
    with _disable_current_modes():
        one = subject.example("meta")
    same = _facts(*one) == _facts(x, t_B, conditions)
    return same and dtype is torch.get_default_dtype()


def _facts(x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]) -> dict[str, Any]:
    named = {"x": x, "t": t_B, **conditions}
    return {name: (value.shape, value.dtype) for name, value in named.items()}


def taken(
    subject: Subject, sample: Callable[[], tuple[Any, ...]], dtype: torch.dtype | None = None
) -> Passage:
    """Return the values for the samples that ``sample`` makes and a model of type ``dtype``."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # A prediction runs under a fake-tensor mode of its own, to which these tensors do not belong.
    with _disable_current_modes(), fake, torch.enable_grad():
        module = subject.make()
        if dtype is not None:
            initial.replace(module, lambda p: nn.Parameter(_typed(p, dtype), p.requires_grad))
        blocks = subject.blocks(module)
        seen = _Seen(module, blocks)
        watched = {n: seen.watched(n, block) for n, block in enumerate(blocks)}
        with Slots(module, blocks).hold(watched), seen:
            out = subject.predict(module, *sample())
        return seen.passage(out)


def _typed(p: nn.Parameter, dtype: torch.dtype) -> Tensor:
    return p.detach().to(dtype) if p.is_floating_point() else p.detach()


@dataclass
class _Seen(TorchDispatchMode):
    """Record of one forward pass. ``inside``: a block runs now; ``done``: blocks that have run."""

    module: nn.Module
    blocks: Sequence[nn.Module]
    inside: bool = False
    done: int = 0
    outputs: list[Output] = field(default_factory=list)
    needs: list[frozenset[Value]] = field(default_factory=list)
    made: dict[int, Value] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)
    early: set[str] = field(default_factory=set)
    outside: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.names = {id(p): name for name, p in self.module.named_parameters()}
        own = [{id(p) for p in block.parameters()} for block in self.blocks]
        self.of_blocks = frozenset[int]().union(*own)
        if sum(map(len, own)) > len(self.of_blocks):
            raise Unfit("some of its blocks share weights")

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.inside:
            for value in tree_leaves((args, kwargs)):
                if id(value) in self.names:
                    self._used_outside(value)
        return f(*args, **kwargs)

    def _used_outside(self, p: Tensor) -> None:
        if id(p) in self.of_blocks:
            # An exception cannot leave an operator: it is raised at the end.
            self.outside.add(self.names[id(p)])
        elif self.done < len(self.blocks):
            self.early.add(self.names[id(p)])

    def watched(self, number: int, block: nn.Module) -> Watched:
        def begins(given: Any) -> None:
            if number != self.done or self.inside:
                raise Unfit(f"its block {number} runs behind {self.done} others")
            self.needs.append(self._reached(given))
            self.inside = True

        def ends(out: Any) -> Any:
            self.inside, self.done = False, number + 1
            return self._cut_off(number, out)

        return Watched(block, ends, begins)

    def _cut_off(self, number: int, out: Any) -> Any:
        leaves, spec = tree_flatten(out)
        for place, value in enumerate(leaves):
            if not torch.is_tensor(value):
                continue
            if not value.is_floating_point():
                raise Unfit(f"its block {number} returns a tensor of {value.dtype}")
            leaves[place] = value.detach().requires_grad_()
            self.made[id(leaves[place])] = (number, place)
            self.alive.append(leaves[place])
        again = torch.utils._pytree.tree_unflatten(leaves, spec)
        self.outputs.append(Output.of(again))
        return again

    def _reached(self, values: Any) -> frozenset[Value]:
        """Return the values of blocks from which ``values`` are computed."""
        tensors = [value for value in tree_leaves(values) if torch.is_tensor(value)]
        found = {self.made[id(t)] for t in tensors if id(t) in self.made}
        left, known = [t.grad_fn for t in tensors if t.grad_fn is not None], set[Any]()
        while left:
            node = left.pop()
            if node in known:
                continue
            known.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) in self.made:
                found.add(self.made[id(leaf)])
            left += [following for following, _ in node.next_functions if following is not None]
        return frozenset(found)

    def passage(self, out: Any) -> Passage:
        if self.done != len(self.blocks):
            raise Unfit(f"{self.done} of its {len(self.blocks)} blocks run")
        if self.outside:
            raise Unfit(f"{min(self.outside)} of a block is used outside of it")
        needs = [*self.needs, self._reached(out)]
        alive = []
        for border in range(len(needs)):
            later = frozenset[Value]().union(*needs[border:])
            alive.append(tuple(sorted(place for place in later if place[0] < border)))
        return Passage(tuple(self.outputs), tuple(alive), frozenset(self.early))
