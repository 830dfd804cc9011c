"""One whole training step, watched for evidence: behind the measured steps, so that neither their
time nor their memory has any of it.

A strategy or an engine that needs more than the operators declares ``observe`` (``Strategy``,
``Engine``); what its context yields is kept as its note.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from strategies.evidence.readings import Observed, Ran, Sent, stored, within, wrapped

if TYPE_CHECKING:
    from strategies.engine import TrainingRun
    from strategies.strategy import Strategy


# ---- collectives ----
# What a call of one of torch's collectives hands over, and among whom.


INPUT = dict.fromkeys(
    (
        "allgather_",
        "_allgather_base_",
        "alltoall_base_",
        "_reduce_scatter_base_",
        "reduce_scatter_",
    ),
    1,
)
"""Collectives whose first argument is the output -> where the input is."""


def handed(name: str, args: Any, phase: str) -> list[Sent]:
    """What a rank gives to the collective ``name`` (torch.ops.c10d's) with ``args``."""
    given = within([args[INPUT.get(name, 0)]]) if args else []
    plain = [t for tensor in given for t in stored(tensor)]
    group = getattr(group_of(args), "group_name", "")
    return [Sent(name, dtype_of(t), t.numel() * t.element_size(), phase, group) for t in plain]


def group_of(args: Any) -> Any | None:
    """The process group among the arguments of one of torch's collectives."""
    import torch
    from torch.distributed import distributed_c10d as c10d

    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return c10d.ProcessGroup.unbox(value)
    return None


def dtype_of(value: Any) -> str:
    """The type of a tensor, or of the first of several; empty of what has none."""
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return str(getattr(first, "dtype", "")).removeprefix("torch.")


_BESIDE: list[str] = []


def observe_step(
    trained: TrainingRun, parts: Iterable[Strategy], step: Callable[[], None], data: Any = None
) -> None:
    """Take ``step`` once with every part watching; leaves ``trained.observed``. ``data`` is what
    the step's samples are fetched from, and may compute them: that is no part's doing."""
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
            stack.enter_context(_apart(data))
        step()
    seen.micro_steps = trained.micro_steps - before
    trained.observed = seen


@contextlib.contextmanager
def beside(phase: str) -> Iterator[None]:
    """What runs is not the trained model's: its operators count in a ``phase`` of their own, so
    that no evidence of the model's takes them for its products."""
    _BESIDE.append(phase)
    try:
        yield
    finally:
        _BESIDE.pop()


DATA = "data"
"""The phase of what fetching samples computes: none of a training step's."""


@contextlib.contextmanager
def _apart(data: Any) -> Iterator[None]:
    """While it lasts what ``data`` fetches is in a phase of its own: a VAE has attention too."""
    if data is None:
        yield
        return
    fetch = data.fetch

    def fetched(*given: Any) -> Any:
        with beside(DATA):
            return fetch(*given)

    data.fetch = fetched
    try:
        yield
    finally:
        del data.fetch


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
            if name.startswith("c10d::") and name != "c10d::recv_":
                seen.sent += handed(name.removeprefix("c10d::"), args, self.phase)
            out = f(*args, **(kwargs or {}))
            shapes = [list(getattr(value, "shape", ())) for value in args]
            seen.ran.append(Ran(name, shapes, dtype_of(out), [self.phase, *_BESIDE][-1]))
            return out

    return Watch()
