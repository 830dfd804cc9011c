"""cuda_graphs: a model call captured as a CUDA graph, so that the host launches all kernels at
once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.strategy import Strategy
from strategies.subject import Subject
from strategies.workloads import SAMPLE

BESIDE = {
    "streams_weights": "weights that come and go are the host's doing; leave block_swap out",
    "cut_samples": "exchanges between ranks inside of a graph were never tried; leave sp out",
    "compiled": "what is compiled has graphs of its own; leave one of the two out",
}
"""Trait -> why a call is not captured with it."""


@dataclass(frozen=True, kw_only=True)
class CudaGraphs(Strategy):
    """Replays the model's call as one CUDA graph.

    Each size of batch has its own graph. The host launches once where it launched each kernel. Each
    graph keeps the memory of its call until the run ends.
    """

    name: ClassVar[str] = "cuda_graphs"
    slot: ClassVar[Slot] = Slot.COMPILE
    workloads: ClassVar[tuple[str, ...]] = (SAMPLE,)
    idle: ClassVar[str] = (
        "a training step is not captured, for its data, its clipping and its optimizer are the "
        "host's; take compile, or --workload sample"
    )
    needs: ClassVar[tuple[str, ...]] = ("cuda",)
    source: ClassVar[str] = "torch.cuda.CUDAGraph; Ng et al. 2021, Accelerating PyTorch with graphs"

    def traits(self) -> frozenset[str]:
        return frozenset({"captured"})

    def refuses(self, launch: RunContext) -> str | None:
        return next((why for trait, why in BESIDE.items() if trait in launch.traits), None)

    def edit_model(self, module: Any, subject: Subject) -> None:
        from strategies.activations.captured import Captured

        module.captured_by = Captured(module.forward)
        module.forward = module.captured_by

    def attach(self, trained: TrainingRun) -> Any:
        return getattr(trained.module, "captured_by", None)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        """Check that all calls were replayed, except those of a watched batch.

        A replay is compared with the same call without a graph, for values that the graph was not
        captured with.
        """
        from strategies.activations.captured import Captured

        captured: Any = trained.attached.get(self.name)
        demand(isinstance(captured, Captured), "no CUDA graph was captured")
        replays, eager = captured.noted
        text = f"{replays} of {trained.micro_steps} calls replayed a graph, and {eager} did not"
        watched = trained.observed.micro_steps if trained.observed else 0
        demand(replays + eager == trained.micro_steps and eager <= watched, text)
        facts = {"graphs": len(captured.graphs), "replays": replays, "calls_of_a_trace": eager}
        demand(replays > len(captured.graphs) > 0, f"{len(captured.graphs)} graphs: {text}")
        return {**facts, "away_from_eager": self._away(trained, captured)}

    def _away(self, trained: TrainingRun, captured: Any) -> float:
        import torch

        from strategies.evidence import states
        from strategies.evidence.reference_check import close_to, output_of
        from strategies.evidence.rules import relative_error

        with torch.no_grad():
            states.forward_once(trained)  # captures this shape with zeros, if it was not captured
            mine = output_of(trained, trained.model, trained.cut)
            with captured.set_aside():
                wanted = output_of(trained, trained.model, trained.cut)
        found, close = relative_error(mine.double(), wanted.double()), close_to(trained, mine.dtype)
        demand(
            found <= close,
            f"a replayed output differs from the eager one by {found:.2g} (relative)",
        )
        return float(f"{found:.2g}")
