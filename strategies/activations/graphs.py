"""A backend of torch.compile that counts, and what a graph keeps for backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from strategies.base import Trained, Watcher
from strategies.support.runners import Weighed

__all__ = ["Counted", "kept_by_a_block"]


class Counted(Watcher):
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


def kept_by_a_block(trained: Trained, given: list[Any], backend: str) -> int:
    """Bytes that autograd holds for one block compiled without a budget, its input included."""
    import torch

    runner = Weighed(lambda blocks, x_BTD, c_BD: compiled(x_BTD, c_BD))
    compiled = torch.compile(trained.module.blocks[0].forward, backend=backend, dynamic=False)
    with torch._functorch.config.patch(activation_memory_budget=1.0), torch.enable_grad():
        values = [torch.zeros(**like, requires_grad=True) for like in given]
        with trained.accelerator.autocast():
            runner(None, *values)
    return runner.kept_bytes
