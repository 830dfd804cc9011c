"""compile: compiled graphs of each block or the whole model, with an optional activation budget."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.activations.block_parts import Recompute
from strategies.activations.runners import runner_of, surround
from strategies.activations.weighed import Call, MeasuredBlocks
from strategies.base import Slot, Watcher, demand
from strategies.engine import RunContext, TrainingRun
from strategies.strategy import Strategy
from strategies.subject import Subject
from strategies.workloads import BOTH

# ---- counting backend ----


class CountingBackend(Watcher):
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


def kept_without_budget(trained: TrainingRun, calls: list[Call], backend: str) -> int:
    """Return the bytes that autograd holds for the blocks compiled without a budget, with inputs.

    One block is compiled for all of the same class and input shapes.
    """
    known: dict[str, int] = {}
    total = 0
    for call in calls:
        alike = f"{type(call.block)} {[(t.shape, t.dtype) for t in call.tensors]}"
        if alike not in known:
            known[alike] = _kept_by_a_block(trained, call, backend)
        total += call.count * known[alike]
    return total


def _kept_by_a_block(trained: TrainingRun, call: Call, backend: str) -> int:
    import torch
    from torch.utils._pytree import tree_map_only

    def zeros(like: Any) -> Any:
        made = torch.zeros_like(like, device=trained.accelerator.device)
        return made.requires_grad_(like.is_floating_point())

    compiled = torch.compile(call.block.forward, backend=backend, dynamic=False)
    runner = MeasuredBlocks(lambda blocks, *given, **named: compiled(*given, **named))
    given, named = tree_map_only(torch.Tensor, zeros, call.given)
    whole = torch._functorch.config.patch(activation_memory_budget=1.0)
    with whole, torch.enable_grad(), trained.accelerator.autocast():
        runner([call.block], *given, **named)
    return runner.kept_bytes


BACKENDS = ("inductor", "aot_eager")


SLACK = 0.05
"""Tolerance of the share: the partitioner chooses whole tensors by its own estimate of their
sizes."""


@dataclass(frozen=True, kw_only=True)
class Compile(Strategy):
    """Compiles each block, or the whole model.

    With ``scope=block`` one graph serves all blocks.

    Beside ``checkpoint``, the recomputed parts are compiled with their checkpoints inside.
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

    def refuses(self, launch: RunContext) -> str | None:
        if self.budget < 1 and "sampling" in launch.traits:
            return f"nothing is kept for a backward pass; leave budget={self.budget:g} out"
        if self.budget < 1 and "some_blocks" in launch.traits:
            return (
                "blocks with adapters and without keep different shares; leave "
                f"budget={self.budget:g} or the adapters' blocks out"
            )
        if self.budget < 1 and "recomputes" in launch.traits:
            return f"checkpoint decides what is kept; leave budget={self.budget:g} or it out"
        if self.scope == "model" and launch.traits & {"recomputes", "moves_activations"}:
            return "kept activations are managed block by block; leave scope=model out"
        return None

    def edit_model(self, module: Any, subject: Subject) -> None:
        import torch
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        torch._functorch.config.activation_memory_budget = self.budget
        given = {"backend": CountingBackend(self.backend), "dynamic": False}
        module.compiled_by, parts = given["backend"], runner_of(module, Recompute)
        if self.scope == "model":
            module.compile(**given)
            return
        if parts is not None:
            parts.compile_parts(functools.partial(torch.compile, **given))
        for block in _alone(parts, subject.blocks(module)):
            block.compile(**given)
        if runner_of(module, MeasuredBlocks) is None:
            surround(module, subject, MeasuredBlocks)

    def attach(self, trained: TrainingRun) -> CountingBackend | None:
        return getattr(trained.module, "compiled_by", None)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        backend: Any = trained.attached.get(self.name)
        demand(isinstance(backend, CountingBackend), "nothing was compiled")
        first, last = backend.steps[0], backend.steps[-1]
        calls, parts = last["calls"] / trained.micro_steps, runner_of(trained.module, Recompute)
        units = parts.parts_run / trained.micro_steps if parts else 0
        units += len(_alone(parts, trained.blocks()))
        units = 1 if self.scope == "model" else units
        demand(
            calls >= units,
            f"{calls} calls of compiled graphs in each micro-batch, expected {units}",
        )
        facts = {
            "graphs": last["graphs"],
            "graph_breaks": last["breaks"],
            "calls": calls,
            "compile_seconds": round(last["seconds"], 2),
            "graphs_after_first_step": last["graphs"] - first["graphs"],
        }
        if self.scope == "block":
            facts["kept_bytes"] = runner_of(trained.module, MeasuredBlocks).kept_bytes
        return {**facts, **self._budgeted(trained)} if self.budget < 1 else facts

    def _budgeted(self, trained: TrainingRun) -> dict[str, Any]:
        """Check the share of kept bytes above the inputs, relative to a block compiled without a
        budget."""
        runner = runner_of(trained.module, MeasuredBlocks)
        full = kept_without_budget(trained, runner.calls, self.backend)
        least = sum(call.count * call.input_bytes for call in runner.calls)
        share = (runner.kept_bytes - least) / (full - least)
        demand(
            share <= self.budget + SLACK,
            f"a share of {share:.2f} of the activations is kept, expected {self.budget}",
        )
        return {"kept_bytes_without_budget": full, "share": round(share, 3)}


def _alone(parts: Recompute | None, blocks: list[Any]) -> list[Any]:
    """Return the blocks that are compiled one by one: those outside of checkpoints."""
    return blocks if parts is None else parts.kept_whole(blocks)
