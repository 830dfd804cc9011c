"""A backend of torch.compile that counts, and what a graph keeps for backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from strategies.activations.weighed import Call, Weighed
from strategies.base import Watcher
from strategies.engine import Trained

__all__ = ["CountingBackend", "kept_without_budget"]


class CountingBackend(Watcher):
    """A backend of torch.compile that counts the graphs it makes and every call of one.

    Beside the training it notes, after every step, what had been counted by then. ``seconds`` are
    Dynamo's own: from the start to the end of every outermost compilation, in forward or in
    backward, with the tracing that comes before a backend is called and the guards after it.
    """

    def __init__(self, backend: str) -> None:
        """Made after ``torch._dynamo.reset``, which forgets whom to call."""
        from torch._dynamo import lookup_backend, on_compile_end, on_compile_start

        self.backend = lookup_backend(backend)
        self.graphs = self.calls = 0
        self.seconds = self.began = 0.0
        self.steps: list[dict[str, float]] = []
        on_compile_start(self._compiling)
        on_compile_end(self._compiled)

    def _compiling(self, _: Any) -> None:
        self.began = time.perf_counter()

    def _compiled(self, _: Any) -> None:
        self.seconds += time.perf_counter() - self.began

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
        compiled = self.backend(graph, inputs, **options)
        self.graphs += 1

        def run(*values: Any) -> Any:
            self.calls += 1
            return compiled(*values)

        return run

    def after_step(self) -> None:
        """Note the counts."""
        from torch._dynamo.utils import counters

        breaks = sum(counters["graph_break"].values())
        now = {"graphs": self.graphs, "calls": self.calls, "breaks": breaks}
        self.steps.append({**now, "seconds": self.seconds})


def kept_without_budget(trained: Trained, calls: list[Call], backend: str) -> int:
    """Bytes that autograd holds for the blocks compiled without a budget, inputs included; of
    blocks of one class that were given alike one is compiled."""
    known: dict[str, int] = {}
    total = 0
    for call in calls:
        alike = f"{type(call.block)} {[(t.shape, t.dtype) for t in call.tensors]}"
        if alike not in known:
            known[alike] = _kept_by_a_block(trained, call, backend)
        total += call.count * known[alike]
    return total


def _kept_by_a_block(trained: Trained, call: Call, backend: str) -> int:
    import torch
    from torch.utils._pytree import tree_map_only

    def zeros(like: Any) -> Any:
        made = torch.zeros_like(like, device=trained.accelerator.device)
        return made.requires_grad_(like.is_floating_point())

    runner = Weighed(lambda blocks, *given, **named: compiled(*given, **named))
    compiled = torch.compile(call.block.forward, backend=backend, dynamic=False)
    given, named = tree_map_only(torch.Tensor, zeros, call.given)
    whole = torch._functorch.config.patch(activation_memory_budget=1.0)
    with whole, torch.enable_grad(), trained.accelerator.autocast():
        runner([call.block], *given, **named)
    return runner.kept_bytes
