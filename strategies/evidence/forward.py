"""One more forward, by which evidence sees what a step computes with."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from strategies.engine import Trained
from strategies.evidence.stored import wrapped

__all__ = ["Operation", "compute_dtype", "eager", "forward_once", "loss_once", "operations"]


def forward_once(trained: Trained, *, gradients: bool = False) -> Any:
    """The trained model's output for one sample of zeros.

    Every rank takes part, because ZeRO-3 gathers parameters on the way.
    """
    import torch

    subject = trained.subject
    x, t_B, conditions = subject.example(trained.accelerator.device)
    with torch.set_grad_enabled(gradients):
        return subject.predict(trained.model, trained.cut(x), t_B, conditions)


def loss_once(trained: Trained) -> Any:
    """A loss to call backward on, of one sample of zeros, with what is added to the true loss
    (``Trained.supervise``), so that weights which only that reaches get a gradient: a teacher is
    asked once more by it. Compiled graphs run uncompiled."""
    with eager(trained):
        if trained.supervise is None:
            return forward_once(trained, gradients=True).float().square().mean()
        x, t_B, conditions = trained.subject.example(trained.accelerator.device)

        def predict(x: Any, t_B: Any) -> Any:
            return trained.subject.predict(trained.model, trained.cut(x), t_B, conditions)

        return trained.supervise(lambda ask: ask(x, t_B).float().square(), predict, conditions)


def compute_dtype(trained: Trained) -> str:
    """The type in which the model's matrix products really ran: that of the output of the first
    linear layer of the blocks.

    A compiled block knows nothing of hooks that came after it, so there it is run uncompiled.
    """
    seen: list[str] = []
    first = trained.module.get_submodule(trained.linears[0])
    handle = first.register_forward_hook(lambda *call: seen.append(str(call[2].dtype)))
    try:
        with eager(trained):
            forward_once(trained)
    finally:
        handle.remove()
    return seen[-1].removeprefix("torch.") if seen else "none"


def eager(trained: Trained) -> Any:
    """A context in which compiled blocks run uncompiled, so that hooks and modes see them."""
    if "compiled" not in trained.launch.traits:
        return contextlib.nullcontext()
    import torch

    return torch.compiler.set_stance("force_eager")


class Operation(NamedTuple):
    """One operation that ran; ``dtype`` is its first output's, empty where it was profiled."""

    name: str
    shapes: list[Any]
    dtype: str = ""


def operations(trained: Trained, *, compiled: bool = True) -> list[Operation]:
    """Every operation of one forward, in order; ``compiled`` False runs compiled graphs eagerly.

    A dispatch mode would do that as well, so graphs are profiled. Not under ZeRO-3, where the
    profiler has crashed (torch 2.13, DeepSpeed 0.19.8).
    """
    graphs = compiled and "compiled" in trained.launch.traits
    if graphs and "split_parameters" not in trained.launch.traits:
        return _profiled(trained)
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[Operation] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if wrapped(types):
                return NotImplemented
            shapes = [list(getattr(value, "shape", ())) for value in args]
            out = f(*args, **(kwargs or {}))
            dtype = str(getattr(out, "dtype", "")).removeprefix("torch.")
            seen.append(Operation(f.overloadpacket._qualified_op_name, shapes, dtype))
            return out

    with eager(trained), Watch():
        forward_once(trained)
    return seen


def _profiled(trained: Trained) -> list[Operation]:
    from torch.profiler import ProfilerActivity, profile

    forward_once(trained)  # compiles for one sample, which shows operations of its own
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        forward_once(trained)
    return [Operation(event.name, event.input_shapes) for event in seen.events()]
