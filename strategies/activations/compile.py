"""compile: compiled graphs of each block or the whole model, with an optional activation budget."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.activations.block_parts import Recompute
from strategies.activations.runners import MeasuredBlocks, runner_of, surround
from strategies.base import Attachment, Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence.rules import label
from strategies.strategy import Strategy
from strategies.subject import Subject
from strategies.workloads import BOTH

DEFAULT = "default"
"""torch.compile's mode without CUDA graphs."""

# ---- counting backend ----


class CountingBackend(Attachment):
    """torch.compile backend that counts its graphs and their calls.

    After every step it records the counts. ``seconds`` are Dynamo's own, which
    ``torch._dynamo.reset`` clears: of every compilation in forward or backward, with tracing and
    guards. With ``mode=reduce-overhead`` it counts CUDA graphs and their replays too.
    """

    def __init__(self, backend: str, mode: str = DEFAULT) -> None:
        import torch
        from torch._dynamo import lookup_backend

        # The object that torch.compile itself makes of the two words.
        wrapper: Any = torch._TorchCompileInductorWrapper
        self.backend = lookup_backend(backend) if mode == DEFAULT else wrapper(mode, None, False)
        self.recordings = None if mode == DEFAULT else count_recordings()
        self.graphs = self.calls = 0
        self.steps: list[dict[str, float]] = []

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
        compiled = self.backend(graph, inputs, **options)
        self.graphs += 1

        def run(*values: Any) -> Any:
            self.calls += 1
            return compiled(*values)

        return run

    def after_step(self) -> None:
        from torch._dynamo.utils import counters, cumulative_time_spent_ns

        names = ("entire_frame_compile", "entire_backward_compile")
        seconds = sum(cumulative_time_spent_ns.get(name, 0.0) for name in names) / 1e9
        breaks = sum(counters["graph_break"].values())
        now = {"graphs": self.graphs, "calls": self.calls, "breaks": breaks, "seconds": seconds}
        if self.recordings is not None:
            now |= {name: self.recordings[name] for name in ("recorded", "replays")}
            now["skipped"] = counters["inductor"]["cudagraph_skips"]
        self.steps.append(now)


# ---- CUDA graphs ----


def count_recordings() -> Counter[str]:
    """Count inductor's CUDA graphs from now on: "recorded", and their "replays".

    Inductor has a graph for each compiled forward and backward of each block. It warms up in the
    first step, records in the second, and replays from the third on. Source: torch 2.13,
    torch/_inductor/cudagraph_trees.py.
    """
    from torch._inductor.cudagraph_trees import CUDAGraphNode

    counts: Counter[str] = Counter()

    def counting(name: str, call: Any) -> Any:
        def counted(node: Any, *given: Any) -> Any:
            counts[name] += 1
            return call(node, *given)

        return counted

    node: Any = CUDAGraphNode
    node._record = counting("recorded", node._record)
    node.run_graph = counting("replays", node.run_graph)
    return counts


def check_replays(steps: list[dict[str, float]]) -> dict[str, int]:
    """Return the recorded CUDA graphs, and the replays of the last step.

    ``steps`` has the counts after each step.

    Raises:
        NotInForce: a graph was skipped, or recorded again, or a compiled call was not a replay.
    """
    demand(len(steps) > 2, f"{len(steps)} steps ran; CUDA graphs are replayed from the third on")
    before, last = steps[-2:]
    skipped, graphs = int(last["skipped"]), int(last["recorded"])
    demand(skipped == 0, f"inductor skipped {skipped} CUDA graphs; TORCH_LOGS=cudagraphs says why")
    again = graphs - int(before["recorded"])
    demand(again == 0, f"{again} CUDA graphs were recorded in the last step, expected none")
    replays, calls = (int(last[name] - before[name]) for name in ("replays", "calls"))
    text = f"the last step replayed {replays} CUDA graphs, expected {calls} at least"
    demand(replays >= calls > 0, text)
    return {"cuda_graphs": graphs, "cuda_graph_replays": replays}


@dataclass(frozen=True, kw_only=True)
class Compile(Strategy):
    """Compiles each block, or the whole model.

    With ``scope=block`` one graph serves all blocks.

    Beside ``checkpoint``, the recomputed parts are compiled with their checkpoints inside. Under
    FSDP2 these are single blocks, between its hooks.
    ``budget`` below 1 keeps that share of the activations that the partitioner would keep, and
    recomputes the rest. ``backend=aot_eager`` captures graphs without generating code.
    ``mode=reduce-overhead`` records each compiled forward and backward as a CUDA graph, so that the
    host launches all kernels of one at once. The graphs keep their memory until the run ends.
    """

    name: ClassVar[str] = "compile"
    slot: ClassVar[Slot] = Slot.COMPILE
    workloads: ClassVar[tuple[str, ...]] = BOTH
    source: ClassVar[str] = (
        "Ansel et al. 2024, PyTorch 2 (ASPLOS); torch._functorch.config.activation_memory_budget"
    )
    values: ClassVar[dict[str, Any]] = {
        "scope": ("block", "model"),
        "backend": ("inductor", "aot_eager"),
        "mode": (DEFAULT, "reduce-overhead"),
    }
    ranges: ClassVar[dict[str, Any]] = {"budget": (lambda v: 0 <= v <= 1, "a share from 0 to 1")}

    scope: str = "block"
    backend: str = "inductor"
    budget: float = 1.0
    mode: str = DEFAULT

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget < 1 and self.scope == "model":
            raise ValueError(f"budget is {self.budget}; it goes by block: leave scope=model out")
        if self.records and (self.scope, self.backend) != ("block", "inductor"):
            raise ValueError(
                f"mode={self.mode} is of inductor's blocks; leave scope and backend out"
            )

    @property
    def records(self) -> bool:
        """True if the compiled blocks are recorded as CUDA graphs."""
        return self.mode != DEFAULT

    def traits(self) -> frozenset[str]:
        return frozenset({"compiled"} | ({"compiled_whole"} if self.scope == "model" else set()))

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        needs = ("inductor",) if self.backend == "inductor" else ()
        return (*needs, "cuda") if self.records else needs

    def edit_model(self, module: Any, subject: Subject) -> None:
        import torch
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        torch._functorch.config.activation_memory_budget = self.budget
        given = {"backend": CountingBackend(self.backend, self.mode), "dynamic": False}
        module.compiled_by = given["backend"]
        if self.records:
            # No tensor of an earlier call of the model is used any more. Otherwise a block without
            # a backward would end the graphs of the blocks before it.
            begin = torch.compiler.cudagraph_mark_step_begin
            module.register_forward_pre_hook(lambda *_: begin())
        if self.scope == "model":
            module.compile(**given)
            return
        for block in _alone(module, subject.blocks(module)):
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
            # Outside of graphs torch would recompute uncompiled.
            parts.part = compiler(parts.part)

    def attach(self, run: TrainingRun) -> CountingBackend | None:
        return getattr(run.module, "compiled_by", None)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        import torch

        parts = runner_of(run.module, Recompute)
        units = parts.parts_run / run.micro_steps if parts else 0
        units += len(_alone(run.module, run.blocks()))
        backend: Any = run.attached.get(self.name)
        facts = graph_facts(run, backend, 1 if self.scope == "model" else units)
        if self.scope == "block":
            facts["kept_bytes"] = runner_of(run.module, MeasuredBlocks).kept_bytes
        if self.records:
            facts |= check_replays(backend.steps)
        if self.budget == 1:
            return facts
        budget = torch._functorch.config.activation_memory_budget
        demand(budget == self.budget, f"torch's budget is {budget:g}, expected {self.budget:g}")
        return label({**facts, "budget": budget}, "budget")


def graph_facts(run: TrainingRun, backend: Any, units: float) -> dict[str, Any]:
    """Return the graphs that ``backend`` compiled, and demand ``units`` calls of them in each
    micro-batch."""
    demand(isinstance(backend, CountingBackend) and bool(backend.steps), "nothing was compiled")
    last = backend.steps[-1]
    calls = last["calls"] / max(run.micro_steps, 1)
    text = f"{calls:g} calls of compiled graphs in each micro-batch, expected {units:g}"
    demand(calls >= units, text)
    return {
        "graphs": last["graphs"],
        "calls": calls,
        # Columns of the report:
        "graph_breaks": last["breaks"],
        "compile_seconds": round(last["seconds"], 2),
    }


def _alone(module: Any, blocks: list[Any]) -> list[Any]:
    """Return the blocks that are compiled one by one: those outside of checkpoints."""
    parts = runner_of(module, Recompute)
    return [block for block in blocks if parts is None or not parts.recomputes(block)]
