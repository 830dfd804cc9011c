"""One whole training step, watched for evidence: behind the measured steps, so that neither their
time nor their memory has any of it.

A strategy or an engine that needs more than the operators declares ``observe`` (``Strategy``,
``Engine``); what its context yields is kept as its note.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from strategies.evidence.stored import stored, within, wrapped

if TYPE_CHECKING:
    from strategies.engine import Trained
    from strategies.strategy import Strategy

__all__ = ["Observed", "Ran", "Sent", "observe_step"]

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")


class Ran(NamedTuple):
    """One operator of the step: torch's name (aten::mm), shapes of its operands, the type of its
    first result, and the phase of the step (``strategies.engine.STEP_PHASES``)."""

    name: str
    shapes: list[list[int]]
    dtype: str
    phase: str


class Sent(NamedTuple):
    """What this rank handed to one collective (allreduce_, _allgather_base_): type and bytes."""

    collective: str
    dtype: str
    bytes: int
    phase: str


@dataclass
class Observed:
    """What one step showed. ``ran`` and ``sent`` are empty where the blocks are compiled, since a
    watched graph would run uncompiled; ``notes`` are the strategies' own, by name, ``engine`` the
    engine's."""

    micro_steps: int = 0
    ran: list[Ran] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    engine: Any = None

    def products(self, *phases: str) -> Counter[str]:
        """Type of the result -> matrix products in these phases."""
        return Counter(r.dtype for r in self.ran if r.name in PRODUCTS and r.phase in phases)

    def sent_in(self, *phases: str) -> dict[str, int]:
        """ "collective type" -> bytes that this rank handed over in these phases."""
        total: Counter[str] = Counter()
        for sent in self.sent:
            if sent.phase in phases:
                total[f"{sent.collective.strip('_')} {sent.dtype}"] += sent.bytes
        return dict(total)


def observe_step(trained: Trained, parts: Iterable[Strategy], step: Callable[[], None]) -> None:
    """Take ``step`` once with every part watching; leaves ``trained.observed``."""
    seen = Observed()
    before = trained.micro_steps
    with contextlib.ExitStack() as stack:
        seen.engine = stack.enter_context(trained.engine.observe(trained))
        for part in parts:
            seen.notes[part.name] = stack.enter_context(part.observe(trained))
        if "compiled" not in trained.launch.traits:
            watch = _watch(seen)
            stack.enter_context(trained.engine.marks(trained, watch.enter))
            stack.enter_context(watch)
        step()
    seen.micro_steps = trained.micro_steps - before
    trained.observed = seen


def _watch(seen: Observed) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        phase = ""

        def enter(self, phase: str) -> None:
            self.phase = phase

        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if wrapped(types):
                return NotImplemented
            name = f.overloadpacket._qualified_op_name
            if name.startswith("c10d::"):
                seen.sent += _handed(name.removeprefix("c10d::"), args, self.phase)
            out = f(*args, **(kwargs or {}))
            shapes = [list(getattr(value, "shape", ())) for value in args]
            seen.ran.append(Ran(name, shapes, _dtype(out), self.phase))
            return out

    return Watch()


INPUT = {"allgather_": 1, "_allgather_base_": 1, "_reduce_scatter_base_": 1, "reduce_scatter_": 1}
"""Collectives whose first argument is the output -> where the input is."""


def _handed(name: str, args: Any, phase: str) -> list[Sent]:
    given = within([args[INPUT.get(name, 0)]]) if args else []
    plain = [t for tensor in given for t in stored(tensor)]
    return [Sent(name, _dtype(t), t.numel() * t.element_size(), phase) for t in plain]


def _dtype(value: Any) -> str:
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return str(getattr(first, "dtype", "")).removeprefix("torch.")
