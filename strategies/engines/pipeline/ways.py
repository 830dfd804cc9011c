"""How the runs of a stage are run: what comes in, what is handed on, and which blocks are there.

``Entered`` is of models that say what runs before their blocks and what behind them; ``Standing``
of any others, whose forward pass every stage runs: the blocks of other stages are stand-ins in it,
which return what was received, and behind a run's last block it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from strategies import initial
from strategies.engines.pipeline import passage
from strategies.engines.pipeline.cut import Cut
from strategies.engines.pipeline.passage import Output, Passage, Watched
from strategies.subject import Subject

__all__ = ["Entered", "Handed", "Standing", "way"]

Borders = list[tuple[Tensor, ...]]
"""What passes behind each run of blocks but the last: tensors on meta."""


class Handed(Exception):
    """What a run hands on to the next: ``tensors``, and ``outputs``, what the blocks so far return.
    It ends the way to a loss that others take to its end."""

    def __init__(self, tensors: tuple[Tensor, ...], outputs: Sequence[Output] = ()) -> None:
        super().__init__("the loss is another stage's")
        self.tensors, self.outputs = tensors, outputs


def way(module: nn.Module, cut: Cut) -> Entered | Standing:
    """How the runs of a cut model are run."""
    return Entered(module, cut) if cut.passage is None else Standing(module, cut, cut.passage)


class Entered:
    """The first run begins with ``enter``, the last ends with ``leave``."""

    def __init__(self, module: nn.Module, cut: Cut) -> None:
        self.module, self.cut = module, cut

    def own(
        self, run: int, received: Sequence[Tensor], outputs: Any, given: Any, named: Any
    ) -> Any:
        """A run of this stage, on what it ``received``, of a model called with the rest."""
        module = self.module
        hidden = module.enter(*given, **named) if run == 0 else received
        hidden = (module.run_blocks(tuple(self.cut.blocks[run]), *hidden), *hidden[1:])
        if run == self.cut.end:
            return module.leave(*hidden, *given, **named)
        raise Handed(tuple(tensor.contiguous() for tensor in hidden))

    def passing(self, subject: Subject, batch: Any) -> Borders:
        """What passes for a micro batch like this one. It is asked of a whole model without memory,
        since a stage knows neither what comes in nor what is behind."""
        with initial.valueless(), torch.no_grad():
            whole = subject.make().to(_floating(self.module))
            x, t_B = batch.x.to("meta"), batch.t.to("meta")
            conditions = {name: value.to("meta") for name, value in batch.conditions.items()}
            whole.run_blocks = _noted
            try:
                subject.predict(whole, x, t_B, conditions)
            except Handed as left:
                alike = [(t.shape, t.dtype) for t in left.tensors]
                return [_room(alike) for _ in range(self.cut.end)]
        raise AssertionError("the model has not run its blocks by run_blocks")


class Standing:
    """The model's own forward pass, with stand-ins for the blocks of other runs."""

    def __init__(self, module: nn.Module, cut: Cut, known: Passage) -> None:
        self.module, self.cut, self.known = module, cut, known
        self.outputs: Sequence[Output] = known.outputs
        self.called: Callable[..., Any] = module
        self.stood = 0
        """How many times a stand-in was called."""

    def own(
        self, run: int, received: Sequence[Tensor], outputs: Any, given: Any, named: Any
    ) -> Any:
        """As ``Entered.own``; ``outputs`` are those of the blocks before, where they are of other
        shapes than those of a step."""
        cut, (first, end) = self.cut, self.cut.bounds(run)
        there = [*(outputs or self.outputs)[:first]]
        made = dict(zip(self.known.alive[first], received, strict=True))

        def ends(number: int, out: Any) -> Any:
            there.append(Output.of(out))
            made.update({(number, leaf): value for leaf, value in enumerate(tree_leaves(out))})
            if number == end - 1 and run < cut.end:
                left = (made[place].contiguous() for place in self.known.alive[end])
                raise Handed(tuple(left), there)
            return out

        standing: dict[int, nn.Module] = {n: self._for(n, there, made) for n in range(first)}
        for number, block in enumerate(cut.blocks[run], first):
            standing[number] = Watched(block, _of(ends, number))
        for number in range(end, cut.depth):
            standing[number] = Missing(number)
        with cut.slots.hold(standing):
            return self.called(*given, **named)

    def _for(self, number: int, there: Sequence[Output], made: Any) -> StandIn:
        def stood() -> None:
            self.stood += 1

        spec, leaves = there[number]
        values = [made.get((number, leaf), value) for leaf, value in enumerate(leaves)]
        return StandIn(values, spec, stood)

    def passing(self, subject: Subject, batch: Any) -> Borders:
        """As ``Entered.passing``."""
        asked = [batch.x, batch.t, *batch.conditions.values()]
        facts = [(t.shape, t.dtype) for t in asked]

        def sample() -> tuple[Any, ...]:
            x, t_B, *others = (torch.empty(shape, dtype=dtype) for shape, dtype in facts)
            return x, t_B, dict(zip(batch.conditions, others, strict=True))

        kind, found = _floating(self.module), self.known
        if not passage.usual(subject, kind, batch.x, batch.t, batch.conditions):
            found = passage.taken(subject, sample, kind)
        self.outputs = found.outputs
        return [_room(found.shaped(self.cut.bounds(run)[1])) for run in range(self.cut.end)]


class StandIn(nn.Module):
    """A block of another run: it returns what was received of it, and in the place of what nobody
    reads zeros of that shape, which take no memory."""

    def __init__(self, values: Sequence[Any], spec: Any, stood: Callable[[], None]) -> None:
        super().__init__()
        self.values, self.spec, self.stood = values, spec, stood

    def forward(self, *given: Any, **named: Any) -> Any:
        """What the block would return, where somebody reads it."""
        self.stood()
        device = next(t.device for t in tree_leaves((given, named)) if torch.is_tensor(t))
        return tree_unflatten([_filled(value, device) for value in self.values], self.spec)


class Missing(nn.Module):
    """A block behind a run, which nothing reaches."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, *given: Any, **named: Any) -> Any:
        """
        Raises:
            AssertionError: it was reached.
        """
        raise AssertionError(f"block {self.number} ran before the run in front of it had ended")


def _filled(value: Any, device: torch.device) -> Any:
    if not isinstance(value, passage.Shaped):
        return value
    return torch.zeros((), dtype=value.dtype, device=device).expand(value.shape)


def _of(function: Callable[..., Any], number: int) -> Callable[[Any], Any]:
    return lambda out: function(number, out)


def _room(facts: Sequence[tuple[torch.Size, torch.dtype]]) -> tuple[Tensor, ...]:
    with initial.valueless():
        return tuple(torch.empty(s, dtype=d, requires_grad=True) for s, d in facts)


def _noted(blocks: Any, *hidden: Tensor) -> Tensor:
    raise Handed(hidden)


def _floating(module: nn.Module) -> torch.dtype:
    return next(p.dtype for p in module.parameters() if p.is_floating_point())
