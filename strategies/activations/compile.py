"""compile: compiled graphs of each block or the whole model, with an optional activation budget."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.activations.block_parts import Recompute
from strategies.activations.runners import runner_of, surround
from strategies.activations.weighed import MeasuredBlocks
from strategies.base import Attachment, Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence.rules import label
from strategies.strategy import Strategy
from strategies.subject import Subject
from strategies.workloads import BOTH

# ---- counting backend ----


class CountingBackend(Attachment):
    """torch.compile backend that counts its graphs and their calls.

    After every step it records the counts. ``seconds`` are Dynamo's own: from start to end of every
    outermost compilation, in forward or backward, including tracing before the backend's call and
    guards after it.
    """

    def __init__(self, backend: str) -> None:
        """Register the callbacks. Call it after ``torch._dynamo.reset``, which clears them."""
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
        """Record the counts."""
        from torch._dynamo.utils import counters

        breaks = sum(counters["graph_break"].values())
        now = {"graphs": self.graphs, "calls": self.calls, "breaks": breaks}
        self.steps.append({**now, "seconds": self.seconds})


BACKENDS = ("inductor", "aot_eager")


@dataclass(frozen=True, kw_only=True)
class Compile(Strategy):
    """Compiles each block, or the whole model.

    With ``scope=block`` one graph serves all blocks.

    Beside ``checkpoint``, the recomputed parts are compiled with their checkpoints inside. Under
    FSDP2 these are single blocks, between its hooks.
    ``budget`` below 1 keeps that share of the activations that the partitioner would keep, and
    recomputes the rest. ``backend=aot_eager`` captures graphs without generating code.
    """

    name: ClassVar[str] = "compile"
    slot: ClassVar[Slot] = Slot.COMPILE
    workloads: ClassVar[tuple[str, ...]] = BOTH
    source: ClassVar[str] = (
        "Ansel et al. 2024, PyTorch 2 (ASPLOS); torch._functorch.config.activation_memory_budget"
    )

    scope: str = "block"
    backend: str = "inductor"
    budget: float = 1.0

    def __post_init__(self) -> None:
        if self.scope not in ("block", "model"):
            raise ValueError(f"scope is {self.scope!r}; one of block, model")
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is {self.backend!r}; one of {', '.join(BACKENDS)}")
        if not 0 <= self.budget <= 1:
            raise ValueError(f"budget is {self.budget}; a share from 0 to 1")
        if self.budget < 1 and self.scope == "model":
            raise ValueError(f"budget is {self.budget}; it goes by block: leave scope=model out")

    def traits(self) -> frozenset[str]:
        return frozenset({"compiled"} | ({"compiled_whole"} if self.scope == "model" else set()))

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        return ("inductor",) if self.backend == "inductor" else ()

    def edit_model(self, module: Any, subject: Subject) -> None:
        import torch
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        torch._functorch.config.activation_memory_budget = self.budget
        given = {"backend": CountingBackend(self.backend), "dynamic": False}
        module.compiled_by = given["backend"]
        if self.scope == "model":
            module.compile(**given)
            return
        for block in _alone(runner_of(module, Recompute), subject.blocks(module)):
            block.compile(**given)
        if runner_of(module, MeasuredBlocks) is None:
            surround(module, subject, MeasuredBlocks)

    def configure(self, accelerator: Any, module: Any, launch: RunContext) -> None:
        """Compile the recomputed parts; the engine decides whether its hooks are within them."""
        import torch

        parts = runner_of(module, Recompute)
        if parts is None:
            return
        compiler = functools.partial(torch.compile, backend=module.compiled_by, dynamic=False)
        if "split_parameters" in launch.traits:
            parts.compile_within(compiler, launch.subject.blocks(module))
        else:
            parts.compile_parts(compiler)

    def attach(self, trained: TrainingRun) -> CountingBackend | None:
        return getattr(trained.module, "compiled_by", None)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        import torch

        parts = runner_of(trained.module, Recompute)
        units = parts.parts_run / trained.micro_steps if parts else 0
        units += len(_alone(parts, trained.blocks()))
        backend: Any = trained.attached.get(self.name)
        facts = graph_facts(trained, backend, 1 if self.scope == "model" else units)
        if self.scope == "block":
            facts["kept_bytes"] = runner_of(trained.module, MeasuredBlocks).kept_bytes
        if self.budget == 1:
            return facts
        budget = torch._functorch.config.activation_memory_budget
        demand(budget == self.budget, f"torch's budget is {budget:g}, expected {self.budget:g}")
        return label({**facts, "budget": budget}, "budget")


def graph_facts(trained: TrainingRun, backend: Any, units: float) -> dict[str, Any]:
    """Return the graphs that ``backend`` compiled, and demand ``units`` calls of them in each
    micro-batch."""
    demand(isinstance(backend, CountingBackend) and bool(backend.steps), "nothing was compiled")
    first, last = backend.steps[0], backend.steps[-1]
    calls = last["calls"] / max(trained.micro_steps, 1)
    text = f"{calls:g} calls of compiled graphs in each micro-batch, expected {units:g}"
    demand(calls >= units, text)
    return {
        "graphs": last["graphs"],
        "graph_breaks": last["breaks"],
        "calls": calls,
        "compile_seconds": round(last["seconds"], 2),
        "graphs_after_first_step": last["graphs"] - first["graphs"],
    }


def _alone(parts: Recompute | None, blocks: list[Any]) -> list[Any]:
    """Return the blocks that are compiled one by one: those outside of checkpoints."""
    return blocks if parts is None else parts.kept_whole(blocks)
