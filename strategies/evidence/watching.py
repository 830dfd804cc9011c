"""Watched step: one whole training step after the measured ones, recorded for evidence.

A strategy or an engine that needs more than the operators overrides ``observe`` (``Strategy``,
``Engine``); its context's value is kept as its note.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from strategies.evidence.readings import Observed, Ran, Sent, stored, within, wrapped

if TYPE_CHECKING:
    from strategies.engine import TrainingRun
    from strategies.strategy import Strategy


# ---- inputs of collectives ----


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
"""Collectives whose first argument is the output -> index of the input."""


FUNCTIONAL = "_c10d_functional"
"""Namespace of the collectives that DTensors call."""


def handed(name: str, args: Any, phase: str) -> list[Sent]:
    """Return what a rank passes to the collective ``name`` (torch.ops.c10d's, or a DTensor's
    functional one) with ``args``."""
    given = within([args[INPUT.get(name, 0)]]) if args else []
    plain = [t for tensor in given for t in stored(tensor)]
    words = [value for value in args if isinstance(value, str)]  # a functional one's group is last
    group = getattr(group_of(args), "group_name", words[-1] if words else "")
    return [Sent(name, dtype_of(t), t.numel() * t.element_size(), phase, group) for t in plain]


def group_of(args: Any) -> Any | None:
    """Return the process group among the arguments of one of torch's collectives."""
    import torch
    from torch.distributed import distributed_c10d as c10d

    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return c10d.ProcessGroup.unbox(value)
    return None


def dtype_of(value: Any) -> str:
    """Return the type of a tensor, or of the first of several; empty for other values."""
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return str(getattr(first, "dtype", "")).removeprefix("torch.")


_BESIDE: list[str] = []


@contextlib.contextmanager
def observing(run: TrainingRun, parts: Iterable[Strategy], data: Any = None) -> Iterator[None]:
    """Let every part watch one step, and set ``run.observed``. Fetching samples from ``data``
    is no part's work."""
    seen = Observed()
    before = run.micro_steps
    with contextlib.ExitStack() as stack:
        seen.engine = stack.enter_context(run.engine.observe(run))
        for part in parts:
            seen.notes[part.name] = stack.enter_context(part.observe(run))
        if "compiled" not in run.launch.traits:
            watching = watch(seen)
            stack.enter_context(run.engine.phase_hooks(run, watching.enter))
            stack.enter_context(watching)
            if data is not None:
                stack.enter_context(_apart(data))
        yield
    seen.micro_steps = run.micro_steps - before
    run.observed = seen


@contextlib.contextmanager
def in_phase(phase: str) -> Iterator[None]:
    """Count operators inside the context in a ``phase`` of their own: they are not the model's."""
    _BESIDE.append(phase)
    try:
        yield
    finally:
        _BESIDE.pop()


@contextlib.contextmanager
def _apart(data: Any) -> Iterator[None]:
    """Count what ``data`` fetches in the phase "data": a VAE has attention too."""
    fetch = data.fetch

    def fetched(*given: Any) -> Any:
        with in_phase("data"):
            return fetch(*given)

    data.fetch = fetched
    try:
        yield
    finally:
        del data.fetch


def watch(seen: Observed) -> Any:
    """Return a mode that records operators and collectives; ``enter`` tells it the phase."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        phase = ""

        def enter(self, phase: str) -> None:
            self.phase = phase

        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if wrapped(types):
                return NotImplemented
            name = f.overloadpacket._qualified_op_name
            kind, _, name_of = name.partition("::")
            if kind in ("c10d", FUNCTIONAL) and name_of not in ("recv_", "wait_tensor"):
                seen.sent += handed(name_of, args, self.phase)
            out = f(*args, **(kwargs or {}))
            shapes = [list(getattr(value, "shape", ())) for value in args]
            seen.ran.append(Ran(name, shapes, dtype_of(out), [self.phase, *_BESIDE][-1]))
            return out

    return Watch()
