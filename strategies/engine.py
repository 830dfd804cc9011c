"""Engine contract, and the objects of a run that engines and strategies receive.

An engine moves gradients and holds a run's shards. A launch file names its engine by accelerate's
distributed type; ``strategies.engines`` has one file or folder for each. An engine stores the facts
of its launch file; a method that needs a run's objects gets them as a ``TrainingRun``. The defaults
are those of plain torch, where every rank holds whole parameters. Only ``evidence`` must be
overridden. Strategies check traits (``conflicts.yaml``), never an engine's name. No method
predicts: the planner traces the same step with an adapter (``harness.planner.adapters``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.base import Settings, Sizes
from strategies.evidence.readings import Observed, stored, tensors
from strategies.inventory import (
    EngineReport,
    ParameterPart,
    Piece,
    Shard,
    TensorInventory,
    TracePoints,
)
from strategies.launch_file import LaunchFile, Layout
from strategies.subject import Subject
from strategies.workloads import TRAIN

if TYPE_CHECKING:
    import torch
    from torch import nn

    from strategies.initial import Draw


STEP_PHASES = ("forward", "backward", "optimizer")
"""Phases of one optimizer step, in order; with several micro-batches the first two alternate. The
phases of a whole run are ``harness.phases.RUN_PHASES``."""
Enter = Callable[[str], None]
"""Callback that receives one of ``STEP_PHASES`` when that phase begins."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Training parameters that an engine needs before it is prepared.

    ``micro_batch``: samples per rank. ``clip``: the limit of the gradient norm (0: none).
    ``sizes``: those of the edited model, in elements. ``scratch``: a swap folder, which may not
    exist yet. ``layout``: the launch's, with the recipe's sequence and tensor parallelism.
    """

    micro_batch: int
    clip: float
    sizes: Sizes
    scratch: Path
    layout: Layout


@dataclass(frozen=True)
class Engine:
    """Behavior of the engine that a launch file names."""

    modules: ClassVar[tuple[str, ...]] = ()
    """Modules that a step imports: loaded first, since libraries are no training memory."""
    buckets: ClassVar[str] = "workspace"
    """Category of communication buckets in a measured step, "gradients" or "workspace"."""
    host_adamw: ClassVar[str] = ""
    """AdamW with its state in host memory, as "module:Class", for the trait "host_optimizer"."""
    unpickles: ClassVar[bool] = False
    """``load`` reads pickles of any kind, which may run code of whoever wrote them."""

    file: LaunchFile

    @classmethod
    def of(cls, file: LaunchFile) -> Engine:
        """Return the engine of a launch file; an engine's own file is read into ``file.settings``.

        Raises:
            LaunchFileError: a required fact is missing.
        """
        return cls(file)

    # ---- launch file facts: in the launching process, without torch ----

    @property
    def choices(self) -> dict[str, Any]:
        """Fields of the sharding strategy that a recipe may set (``fsdp2:reshard=off``) -> the
        file's values."""
        return {}

    def chosen(self, choices: Mapping[str, Any]) -> Engine:
        """Return the engine with these values of ``choices``.

        Raises:
            ValueError: a value out of range, with the remedy.
        """
        return self

    @property
    def needs(self) -> tuple[str, ...]:
        """Requirements of the machine (``harness.system.requirements``)."""
        return ()

    @property
    def traits(self) -> frozenset[str]:
        """Traits under this launch file, listed in ``conflicts.yaml``."""
        return frozenset()

    def layout(self, ranks: int) -> Layout:
        """Return the layout of ``ranks`` ranks, which decides micro-batch and samples."""
        return Layout(replicate=ranks)

    def place(self, what: str) -> str:
        """Return the placement of the "optimizer" or the "parameters": device, cpu or nvme."""
        return "device"

    @property
    def usual_name(self) -> str:
        """Name of the launch file of the same kind in ``launch_configs``."""
        return self.file.path.stem

    def refuses(self, launch: RunContext) -> str | None:
        """Return why it cannot run under ``launch``, with the remedy; None if it can."""
        return None

    def environment(self, device: str) -> dict[str, str]:
        """Return variables of its processes beside the launch file; ``device``: cpu or cuda."""
        # With torchrun, accelerate's launcher drops the launch file's use_cpu.
        return {"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}

    def accelerator_kwargs(self, launch: RunContext) -> dict[str, Any]:
        """Return keyword arguments for ``Accelerator``, beside the strategies'."""
        if launch.device == "cpu":
            return {"cpu": True}
        return process_group("fake") if launch.simulated else {}

    def remarks(self, launch: RunContext, sizes: Sizes | None) -> list[str]:
        """Return notes for a reader of a row that runs; ``sizes``: None if not known yet."""
        return []

    # ---- set-up of each rank (harness.worker.setup) ----

    def configure(self, accelerator: Any, work: Workload) -> None:
        """Set what the launch file leaves open, such as buffer sizes, after all strategies have
        edited the model."""

    def sixteen_bits(self, accelerator: Any, *, master: bool = True, scale: int = 0) -> None:
        """Set how the engine keeps 16-bit weights: with a float32 ``master`` or without; ``scale``:
        the first loss scale of float16 (a power of two; 0: the library's own)."""

    def fill(self, accelerator: Any, module: Any, draw: Draw, blocks: Sequence[Any]) -> None:
        """Draw the edited model's first weights where they will live, one parameter at a time,
        unless the model was built whole (``strategies.initial``)."""
        from strategies import initial

        initial.fill(module, draw, accelerator.device)

    def prepare(
        self,
        accelerator: Any,
        module: Any,
        make_optimizer: Callable[[list[Any]], Any],
        blocks: Sequence[Any],
    ) -> tuple[Any, Any]:
        """Return the model and the optimizer as they are trained, of the edited model.

        Call ``make_optimizer(params)`` once, with the trained parameters as the optimizer will step
        them: after sharding if sharding replaces them.
        """
        optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad])
        return accelerator.prepare(module, optimizer)

    # ---- in a script that prepares its own model (harness.script) ----

    def runs(self, accelerator: Any) -> bool:
        """Return whether an ``Accelerator`` that a script made runs this engine."""
        found = accelerator.distributed_type.value
        return found == self.file.kind

    def adopt(self, accelerator: Any, layout: Layout) -> None:
        """Set what a script's new ``Accelerator`` does not read from the launch file."""

    def adopt_model(
        self, accelerator: Any, module: nn.Module, blocks: Sequence[nn.Module], work: Workload
    ) -> None:
        """Set what the launch file leaves open, before a script prepares ``module`` by itself.

        Raises:
            BadInput: the script's call lacks something that the engine needs.
        """

    # ---- one optimizer step ----

    def micro_steps(
        self,
        run: TrainingRun,
        batches: Iterable[Any],
        arrived: Callable[[], None],
    ) -> Iterator[Any]:
        """Run one optimizer step: forward and backward of each micro-batch, then the optimizer's.

        Args:
            batches: one for each micro-batch (``harness.data.feed.Batch``).
            arrived: call it once, when all gradients exist and are unused: the loop then clips.

        Yields:
            The detached loss of each micro-batch, without device synchronization.
        """
        accelerator = run.accelerator
        for batch in batches:
            with accelerator.accumulate(run.model):
                loss = run.loss(batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    arrived()
                run.optimizer.step()
                run.optimizer.zero_grad()
            yield loss.detach()

    def norm(self, run: TrainingRun, limit: float = 0.0) -> Any:
        """Return the global L2 norm of the gradients over all ranks, without a loss scale. With a
        ``limit`` they are then clipped to it, unless the engine does so itself ("own_clipping")."""
        import torch

        trainable = [p for p in run.module.parameters() if p.grad is not None]
        if limit:
            return run.accelerator.clip_grad_norm_(trainable, limit)
        # clip_grad_norm_ with an infinite limit would still multiply every gradient by one.
        grads = [p.grad for p in trainable]
        return torch.nn.utils.get_total_norm(
            [g.coalesce().values() if g.is_sparse else g for g in grads]
        )

    # ---- around a watched step ----

    def phase_hooks(
        self, run: TrainingRun, enter: Enter
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context for one untimed step that calls ``enter`` at the start of each of
        ``STEP_PHASES``; the gradient norm belongs to "optimizer"."""
        return backward_hook(run, enter, behind="optimizer")

    def trace_points(self, run: TrainingRun) -> TracePoints:
        """Return the leaves at which gradients arrive on this rank, and the library methods whose
        allocations have a category that ``held`` cannot show."""
        return TracePoints([p for p in run.module.parameters() if p.requires_grad])

    def held(self, run: TrainingRun) -> TensorInventory:
        """Return the tensors that this rank holds between two steps, by category, for a trace."""
        parameters = [t for p in run.module.parameters() for t in stored(p.data)]
        return TensorInventory(
            {
                "parameters": [*parameters, *run.module.buffers()],
                "optimizer_state": tensors(run.inner_optimizer),
                "gradients": [p.grad for p in run.module.parameters() if p.grad is not None],
            }
        )

    def observe(self, run: TrainingRun) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the observed step, whose value ``evidence`` reads in
        ``run.observed.engine``."""
        return contextlib.nullcontext()

    # ---- between two steps ----

    def optimized(self, run: TrainingRun) -> list[torch.Tensor]:
        """Return the tensors that the optimizer updates on this rank: parameters, or pieces of
        them such as flat float32 masters."""
        groups = run.inner_optimizer.param_groups
        return [p for group in groups for p in group["params"]]

    def shards(self, run: TrainingRun) -> Iterator[Shard]:
        """Yield each of ``optimized``, in the order of the trained parameters; the tensor of a
        swapped one is in memory until the next is requested."""
        states = run.inner_optimizer.state

        def state(p: Any) -> Mapping[str, Any]:
            return states.get(p) or states.get(getattr(p, "on_device", p), {})

        def pieces(name: str, p: Any) -> Iterator[Piece]:
            if run.accelerator.is_main_process:
                yield Piece(name, 0, p.numel(), 0)

        named = [(n, p) for n, p in run.module.named_parameters() if p.requires_grad]
        for number, (name, p) in enumerate(named):
            yield Shard(number, p, partial(state, p), partial(pieces, name, p))

    def whole(self, run: TrainingRun, parameters: Sequence[Any]) -> Iterator[Any]:
        """Yield the parameters (of ``global_parameters``) one at a time, each whole until the next
        is requested; all ranks call and exhaust it."""
        yield from parameters

    def global_parameters(self, run: TrainingRun) -> Mapping[str, Any]:
        """Return name -> parameter of the whole model, in one order on all ranks; on meta if only
        other ranks have it."""
        return dict(run.module.named_parameters())

    def part(self, parameter: Any) -> ParameterPart:
        """Return this rank's part of a parameter between two steps, and the whole's shape."""
        return ParameterPart(parameter, parameter.shape)

    # ---- checkpoints, on all ranks ----

    def save(self, run: TrainingRun, path: Path) -> None:
        """Write the training state into the folder ``path``, which may not exist yet."""
        # Streamed weights are parts of one tensor, of which accelerate saves none as safetensors.
        parts = "streams_weights" in run.launch.traits
        run.accelerator.save_state(str(path), safe_serialization=not parts)

    def load(self, run: TrainingRun, path: Path) -> None:
        """Read a checkpoint of ``save`` into prepared objects."""
        run.accelerator.load_state(str(path))

    # ---- after the last step ----

    def report(self, run: TrainingRun) -> EngineReport:
        """Return the library's own statistics, for the audit and evidence."""
        scaler = run.accelerator.scaler
        return EngineReport(loss_scale=None if scaler is None else float(scaler.get_scale()))

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        """Return facts read back from ``run`` that show the engine in force; every rank calls
        it, to its end.

        Raises:
            NotInForce: it is not in force (``strategies.base.demand``); the row is then void.
        """
        raise NotImplementedError


# ---- parts of engines ----


def process_group(backend: str) -> dict[str, Any]:
    """Return a process group of this backend, as a keyword argument for ``Accelerator``."""
    from accelerate import InitProcessGroupKwargs

    return {"kwargs_handlers": [InitProcessGroupKwargs(backend=backend)]}


@contextlib.contextmanager
def backward_hook(run: TrainingRun, enter: Enter, behind: str) -> Iterator[None]:
    """Implement ``Engine.phase_hooks`` by wrapping accelerate's ``backward``. ``behind``: the phase
    behind the last backward of a step; empty if the engine marks it itself."""
    accelerator = run.accelerator
    backward = accelerator.backward

    def marked(*given: Any, **more: Any) -> None:
        enter("backward")
        backward(*given, **more)
        phase = behind if accelerator.sync_gradients else "forward"
        if phase:
            enter(phase)

    accelerator.backward = marked
    enter("forward")
    try:
        yield
    finally:
        accelerator.backward = backward


# ---- objects of a run ----


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Launch, model and recipe of a run, as strategies and engines receive them.

    ``simulated``: one process represents rank 0 of ``processes``, and collectives move nothing.
    ``sequence``, ``tensor``: numbers of ranks that split the tokens of a sample, and the weights.
    """

    sharding: str
    engine: Engine
    subject: Subject
    device: str
    processes: int
    accumulation: int = 1
    sequence: int = 1
    tensor: int = 1
    clips: bool = False
    simulated: bool = False
    traits: frozenset[str] = frozenset()
    workload: str = TRAIN

    @property
    def layout(self) -> Layout:
        """Layout of the ranks by the engine and the recipe's sequence and tensor parallelism."""
        return self.engine.layout(self.processes).divided(self.sequence, self.tensor)


@dataclass(kw_only=True)
class TrainingRun:
    """Objects of a run, from which evidence is read after its last step.

    ``model`` and ``optimizer`` are the results of ``Accelerator.prepare``; ``module`` is the bare
    model inside. ``optimizer_steps`` of the whole training, ``resumed_steps`` of an earlier process
    and ``micro_steps`` of this one are the loop's own counts. In sampling a step is a batch of
    samples, a micro step a model call. ``ops``: every operator of one traced step, and ``observed``
    the record of a watched one; both are empty in a training run. ``gradient_norm``: set by a part
    that frees gradients early; returns the global norm of the last backward. ``supervise``: set by
    a part that adds to the true loss: takes the per-sample loss as a function of a prediction
    function, that function, and a micro-batch's conditions; returns the scalar to differentiate.
    """

    accelerator: Any
    model: Any
    module: nn.Module
    optimizer: Any
    launch: RunContext
    settings: Settings
    attached: dict[str, Any] = field(default_factory=dict)
    optimizer_steps: int = 0
    resumed_steps: int = 0
    micro_steps: int = 0
    gradient_norm: Callable[[], Any] | None = None
    supervise: Callable[[Callable[[Any], Any], Any, Mapping[str, Any]], Any] | None = None
    ops: set[str] = field(default_factory=set)
    observed: Observed = field(default_factory=Observed)

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the scalar loss of a micro-batch (``harness.data.feed.Batch``)."""
        raise NotImplementedError

    def inputs(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the noisy samples and timesteps that the model is given, for an engine that calls
        its first and last layers apart (pipeline stages)."""
        raise NotImplementedError

    @property
    def engine(self) -> Any:
        """Engine of the launch; Any, because each engine's evidence reads its own fields."""
        return self.launch.engine

    @property
    def subject(self) -> Subject:
        """Trained model and its data."""
        return self.launch.subject

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        """Optimizer that owns the state, below accelerate's and DeepSpeed's wrappers."""
        optimizer = self.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        return optimizer

    def cut(self, samples: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of whole samples: all of them, unless ranks split tokens."""
        layout = self.launch.layout
        if layout.sequence == 1:
            return samples
        part = layout.part(self.accelerator.process_index)
        return samples.chunk(layout.sequence, dim=self.subject.stripes.axis)[part]

    def blocks(self) -> list[nn.Module]:
        """Return the model's blocks, in execution order."""
        return self.subject.blocks(self.module)

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the blocks' linear layers on this rank; a pipeline rank has some of them."""
        if "stages" not in self.launch.traits:
            return self.subject.linears
        here = dict(self.module.named_modules())
        return tuple(name for name in self.subject.linears if name in here)

    def optimized(self) -> list[torch.Tensor]:
        """Return the tensors that the optimizer updates on this rank: parameters, or float32
        masters."""
        return self.engine.optimized(self)
