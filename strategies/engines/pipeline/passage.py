"""What passes between the blocks of a model that runs them in a forward pass of its own.

A model of which nothing is known but its blocks is taken once through a prediction on tensors
without memory. Each block's outputs are cut off from what made them: so it shows which of them what
comes later is computed from, and which weights are used before the last block has run.
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
from strategies.subject import Subject

__all__ = ["Output", "Passage", "Shaped", "Slots", "Unfit", "Watched", "of", "taken", "usual"]

Place = tuple[int, int]
"""(block, which of the tensors that it returns)."""


class Unfit(ValueError):
    """Why a model's blocks cannot be given to several stages."""


class Shaped(NamedTuple):
    """A tensor that a block returns."""

    shape: torch.Size
    dtype: torch.dtype


class Output(NamedTuple):
    """What a block returns: its structure, and of each leaf a ``Shaped``, or what is no tensor."""

    spec: TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, out: Any) -> Output:
        leaves, spec = tree_flatten(out)
        kept = (Shaped(x.shape, x.dtype) if torch.is_tensor(x) else x for x in leaves)
        return cls(spec, tuple(kept))


@dataclass(frozen=True)
class Passage:
    """``outputs`` of each block; ``alive``: for each block what those before it have returned and
    it or something behind it is computed from, one more for what is behind the last; ``early``:
    names of the parameters that are used outside of blocks before the last one has run."""

    outputs: tuple[Output, ...]
    alive: tuple[tuple[Place, ...], ...]
    early: frozenset[str]

    def shaped(self, border: int) -> tuple[Shaped, ...]:
        """What passes in front of a block."""
        return tuple(self.outputs[block].leaves[leaf] for block, leaf in self.alive[border])


class Slots:
    """Where a model has its blocks, so that others can stand there for a while."""

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
        """Have these stand in the places of the blocks of these numbers."""
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
    """A block of which ``begins`` is told what it is given, and ``ends`` what it returns, for which
    another may be given on."""

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
        """See the block's."""
        self.begins((given, named))
        return self.ends(self.block(*given, **named))


# ---- taken once ----


def of(subject: Subject) -> Passage:
    """What passes between the blocks of ``subject``, for one sample; it is found once a process.

    Raises:
        Unfit: its blocks cannot be given to several stages.
    """
    return _of(subject)


@functools.lru_cache(maxsize=16)
def _of(subject: Subject) -> Passage:
    return taken(subject, lambda: subject.example("cpu"))


def usual(
    subject: Subject, dtype: torch.dtype, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]
) -> bool:
    """Whether samples are like the one of ``of``, but for their values, and so is the type."""
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
    """The same, of the samples that ``sample`` makes, and a model of that type."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # A prediction's own tensors without memory are of another mode, and these are not its.
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
    """What a prediction shows. ``inside``: whether a block runs; ``done``: how many have."""

    module: nn.Module
    blocks: Sequence[nn.Module]
    inside: bool = False
    done: int = 0
    outputs: list[Output] = field(default_factory=list)
    needs: list[frozenset[Place]] = field(default_factory=list)
    made: dict[int, Place] = field(default_factory=dict)
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
            # An operator cannot be left by an exception: it is said at the end.
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

    def _reached(self, values: Any) -> frozenset[Place]:
        """What blocks have returned that these values are computed from."""
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
            later = frozenset[Place]().union(*needs[border:])
            alive.append(tuple(sorted(place for place in later if place[0] < border)))
        return Passage(tuple(self.outputs), tuple(alive), frozenset(self.early))
