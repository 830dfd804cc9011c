"""The contract of an engine, who moves gradients and holds the shards of a run; and the run.

A launch file names its engine by accelerate's distributed type; ``strategies.engines`` has one file
or folder each. An engine holds the facts of its launch file and nothing of a run: a method that
works on a run's objects gets them as an argument (``Trained``). The defaults are those of plain
torch, where every rank holds whole parameters and accelerate does the rest; an engine overrides
what it does otherwise, and must override ``evidence``. Strategies ask its traits
(``strategies.base.TRAITS``), never its name.

In the order of a run: ``of`` and the facts of the launch file (the launching process, without
torch); ``accelerator_kwargs``, ``configure``, ``fill``, ``sixteen_bits``, ``prepare``, ``ready``
(each rank, ``harness.worker.setup``); ``micro_steps``, ``norm``, ``clip``, ``mean``
(``harness.worker.loop``); ``marks``, ``held``, ``makers`` (a traced step,
``harness.memory.traced_step``); ``observe`` (one more step, ``strategies.evidence.watching``);
``told`` and ``evidence`` (after the last step, ``harness.worker.audit``). A prediction runs the
same set-up and step with ``imitation`` in place of what needs real ranks or devices
(``harness.planner``).

``Launch`` and ``Trained`` stand here because an engine is part of both and is given both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.base import Attachment, Settings, Sizes
from strategies.evidence.readings import Observed, stored, tensors
from strategies.inventory import (
    AllocationRecorder,
    AllocationScope,
    EngineReport,
    Fragment,
    ResolvedConfig,
    TensorInventory,
)
from strategies.launch_file import LaunchFile, Layout
from strategies.subject import Subject
from strategies.workloads import TRAIN

if TYPE_CHECKING:
    import torch
    from torch import nn

    from strategies.initial import Draw


STEP_PHASES = ("forward", "backward", "optimizer")
"""The phases of one optimizer step, in order; with several micro batches the first two alternate.
The phases of a whole run are ``harness.phases.RUN_PHASES``."""
Enter = Callable[[str], None]
"""Called with one of ``STEP_PHASES`` where that phase begins."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What an engine must know of the training before it is prepared.

    ``micro_batch`` in samples a rank, ``clip`` the limit of the gradient norm (0: none), ``sizes``
    those of the edited model in elements, ``scratch`` a folder to swap to, which may not exist yet,
    ``layout`` that of the launch, with what the recipe cuts beside the engine.
    """

    micro_batch: int
    clip: float
    sizes: Sizes
    scratch: Path
    layout: Layout


class TraceAdapter:
    """How a prediction stands in for an engine's launch, on tensors without storage.

    Its methods are called in the order in which they stand here (``harness.planner.tracing``); the
    defaults do nothing, which is right for an engine that runs without storage as it is.
    ``ranks``: whether the engine wants a process group (a fake one is made).
    ``rank``: the rank of the launch for which it stands.
    """

    ranks: ClassVar[bool] = True
    rank: int = 0
    shapes_in: ClassVar[tuple[str, ...]] = ()
    """Endings of the library's files that remember shapes as tensors on ``meta``; these are not
    counted as the GPU's, whose tensors are on ``meta`` here as well."""

    def beside(self, launch: RunContext) -> frozenset[str]:
        """The phases of a step in which collectives run beside the computation; those that the
        imitation itself records (``Books.work``) are not meant."""
        return frozenset()

    def environment(self, launch: RunContext) -> dict[str, str]:
        """Variables that accelerate's launcher would add to a rank's environment for this engine;
        set as long as the prediction lasts."""
        return {}

    def begin(self, launch: RunContext, device: str) -> None:
        """Called once the process group is there and before ``Accelerator`` is made: give the
        library its view of the device. ``device`` is the device type whose tensors stand for the
        GPU's ("meta")."""

    def made(self, accelerator: Any, launch: RunContext) -> None:
        """Called with the new ``Accelerator``: set its state to what it would be on GPUs."""

    def stand_ins(self, books: AllocationRecorder) -> list[contextlib.AbstractContextManager[Any]]:
        """Contexts, entered before the set-up and left after the last step, that replace what needs
        real bytes; each says why."""
        return []

    def prepared(self, trained: TrainingRun, books: AllocationRecorder) -> Callable[[], None]:
        """Called between ``Engine.ready`` and the first step: record in ``books`` what lives beside
        the prepared objects. The result is called after the last step."""
        return lambda: None


@dataclass(frozen=True)
class Engine:
    """What the engine of a launch file does.

    ``modules``: what a step will import, loaded before a CPU's meter takes its baseline, so that
    libraries do not count as memory of the training. ``buckets``: the category of a measured step
    in which communication buckets count, "gradients" or "workspace". ``host_adamw_class``: name of
    the class that ``host_adamw`` makes, for the evidence; empty where the trait "host_optimizer" is
    never given.
    """

    modules: ClassVar[tuple[str, ...]] = ()
    buckets: ClassVar[str] = "workspace"
    host_adamw_class: ClassVar[str] = ""
    resumes_on_any: ClassVar[bool] = False
    """Whether what it saved on so many processes can be loaded on another number of them."""
    unpickles: ClassVar[bool] = False
    """Whether ``load`` reads pickles of any kind, which may run code of whoever wrote them."""

    file: LaunchFile

    @classmethod
    def of(cls, file: LaunchFile) -> Engine:
        """The engine of a launch file that names this class. Override it to read a file of the
        engine's own into ``file.settings``.

        Raises:
            LaunchFileError: the file lacks what the engine must know, or names a file that does;
                every launch is then refused with this message.
        """
        return cls(file)

    # ---- facts of the launch file ----

    @property
    def choices(self) -> dict[str, Any]:
        """What a recipe may choose beside the launch file, as in ``fsdp2:reshard=off``: the name of
        a parameter -> what the file gives. They become fields of the sharding strategy."""
        return {}

    def chosen(self, choices: Mapping[str, Any]) -> Engine:
        """The engine with these values of ``choices``; in a recipe they are text, or numbers.

        Raises:
            ValueError: a value out of range: names it and the way out.
        """
        return self

    @property
    def needs(self) -> tuple[str, ...]:
        """What the machine must have, in words of ``harness.system.requirements``; a run that lacks
        one is "unsupported", and is not started."""
        return ()

    @property
    def traits(self) -> frozenset[str]:
        """What strategies may have to know of it, for this launch file; the words are listed in
        TRAITS under "Of engines". A strategy refuses to run beside some of them."""
        return frozenset()

    def layout(self, ranks: int) -> Layout:
        """How so many ranks are used; the micro batch and each rank's samples follow from it."""
        return Layout(replicate=ranks)

    def place(self, what: str) -> str:
        """Where the "optimizer" or the "parameters" are kept: device, cpu or nvme."""
        return "device"

    def by_block(self, depth: int) -> Sequence[Hashable]:
        """How it treats each of the model's ``depth`` blocks, as ``Strategy.by_block``."""
        return [None] * depth

    def refuses(self, launch: RunContext) -> str | None:
        """Why it cannot run under ``launch``, then "; " and the way out; None if it can. Asked
        before any process starts, and again in each rank. The row is then "refused"."""
        return None

    def environment(self, device: str) -> dict[str, str]:
        """Variables that its processes need beside the launch file; ``device`` is cpu or cuda."""
        # torchrun's path drops the launch file's use_cpu.
        return {"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}

    def accelerator_kwargs(self, launch: RunContext) -> dict[str, Any]:
        """Keyword arguments for ``Accelerator``, merged with those of the strategies
        (``Recipe.accelerator_kwargs``)."""
        if launch.device == "cpu":
            return {"cpu": True}
        return self.group("fake") if launch.simulated else {}

    @staticmethod
    def group(backend: str) -> dict[str, Any]:
        """A process group of this backend, as a keyword argument for ``Accelerator``."""
        from accelerate import InitProcessGroupKwargs

        return {"kwargs_handlers": [InitProcessGroupKwargs(backend=backend)]}

    def remarks(self, launch: RunContext, sizes: Sizes | None) -> list[str]:
        """Sentences that a reader of such a row should know though it can run; kept in the result
        as notes. ``sizes`` are the model's, None where they are not known without torch."""
        return []

    def settled(
        self,
        launch: RunContext,
        work: Callable[[Path], Workload],
        mixed_precision: str,
        configure: Callable[[Any], None],
        folder: Path,
    ) -> ResolvedConfig:
        """The launch file with every number in place, for use without Headroom: what ``configure``
        and accelerate settle in a run. An engine whose launch file names others gives them too.

        Args:
            work: makes the workload, given a folder to swap to; sizes of an edited model cost a
                process of their own, so it is called only where they are needed.
            mixed_precision: accelerate's word: no, bf16 or fp16.
            configure: the precision strategy's ``configure``, to be given what stands for the
                ``Accelerator``.
            folder: where the files will lie.
        """
        own = {"num_processes": launch.processes, "mixed_precision": mixed_precision}
        return ResolvedConfig({**self.file.content, **own})

    # ---- set-up ----

    def configure(self, accelerator: Any, work: Workload) -> None:
        """Settle what the launch file left open, such as buffer sizes. Called when all strategies
        have edited the model, before any of them is asked to ``configure``."""

    def sixteen_bits(self, accelerator: Any, *, master: bool = True, scale: int = 0) -> None:
        """Settle how 16-bit weights are kept where the engine keeps them: with a float32
        ``master`` or without, and the first loss ``scale`` of float16 (a power of two; 0: the
        library's own). Called by precision strategies from their ``configure``. Where autocast or
        the strategy does it all, there is nothing to do."""

    def host_adamw(self, params: list[Any], settings: Settings) -> Any:
        """AdamW, with all of ``settings``, whose state is in host memory. Called by ``adamw`` where
        the engine has the trait "host_optimizer", and must be given there."""
        raise NotImplementedError

    def fill(self, accelerator: Any, module: Any, draw: Draw, blocks: Sequence[Any]) -> None:
        """Give the edited model its first weights where they will live, one parameter after the
        other (``strategies.initial``). Called after ``configure``; where the model was built whole
        nothing waits, and it is not called. By default on the accelerator's device. ``blocks`` are
        the model's, in the order in which they run."""
        from strategies import initial

        initial.fill(module, draw, accelerator.device)

    def prepare(
        self,
        accelerator: Any,
        module: Any,
        make_optimizer: Callable[[list[Any]], Any],
        blocks: Sequence[Any],
    ) -> tuple[Any, Any]:
        """The model and the optimizer as they are trained (``Trained.model`` and ``optimizer``).

        ``module`` is the edited model as ``fill`` left it, in train mode, ``blocks`` are its own.
        ``make_optimizer(params)`` makes the recipe's optimizer; call it once, with the trained
        parameters as the optimizer will step them: before accelerate's own prepare here, but after
        the model is sharded where sharding replaces its parameters. ``module`` must stay the bare
        model inside.
        """
        optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad])
        return accelerator.prepare(module, optimizer)

    def prepare_to_sample(self, accelerator: Any, module: Any) -> Any:
        """The model as samples are drawn with it (``Trained.model``): ``module`` takes no gradient
        and is in eval mode, and there is no optimizer. Called in place of ``prepare`` where the
        workload is sampling."""
        return accelerator.prepare_model(module, evaluation_mode=True)

    def ready(self, trained: TrainingRun) -> None:
        """Called when every strategy is attached: the last thing before the first step."""

    # ---- one optimizer step ----

    def micro_steps(
        self,
        trained: TrainingRun,
        batches: Iterable[Any],
        loss_of: Callable[[Any], Any],
        arrived: Callable[[], None],
    ) -> Iterator[Any]:
        """One optimizer step: forward and backward of each micro batch and, after the last, the
        optimizer's step.

        Args:
            batches: as many as there are micro batches in the step (``harness.data.feed.Batch``).
            loss_of: the forward pass, a scalar loss of one batch.
            arrived: to be called once a step, when all gradients are there and before the optimizer
                uses them: the loop then reads their norm, and clips (``norm``, ``clip``).

        Yields:
            The detached loss of each micro batch, a scalar tensor; nothing waits for the device.
        """
        accelerator = trained.accelerator
        for batch in batches:
            with accelerator.accumulate(trained.model):
                loss = loss_of(batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    arrived()
                trained.optimizer.step()
                trained.optimizer.zero_grad()
            yield loss.detach()

    def norm(self, trained: TrainingRun) -> Any:
        """Global L2 norm of the gradients as they are, over all ranks' shares of them: a scalar
        tensor or a float, without a loss scale. Called from ``arrived``."""
        import torch

        # clip_grad_norm_ with an infinite limit would still multiply every gradient by one.
        grads = [p.grad for p in trained.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(
            [g.coalesce().values() if g.is_sparse else g for g in grads]
        )

    def norm_of(self, trained: TrainingRun, norms: list[Any]) -> Any:
        """``norm`` where gradients are gone by then, from the norm that each had, or what this rank
        had of it."""
        import torch

        return torch.linalg.vector_norm(torch.stack(norms))

    def clip(self, trained: TrainingRun, limit: float) -> Any:
        """Clip the gradients to the norm ``limit``; returns their norm from before, as ``norm``.
        Called from ``arrived`` where the spec clips, but not where the engine clips by itself
        ("own_clipping")."""
        if trained.launch.layout.tensor > 1:  # accelerate would clip each rank by its part's norm
            return self.clip_by(trained, self.norm(trained), limit)
        parameters = [p for p in trained.module.parameters() if p.grad is not None]
        return trained.accelerator.clip_grad_norm_(parameters, limit)

    def clip_by(self, trained: TrainingRun, norm: Any, limit: float) -> Any:
        """``clip`` where the gradients' ``norm`` is of more than this rank holds of them."""
        import torch

        own = [p for p in trained.module.parameters() if p.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(own, limit, norm)
        return norm

    def mean(self, trained: TrainingRun, values: Any) -> Any:
        """The mean over all ranks of a tensor of one shape that each has, on every rank; all ranks
        call it. Losses are averaged so."""
        return trained.accelerator.reduce(values, reduction="mean")

    def marks(self, trained: TrainingRun, enter: Enter) -> contextlib.AbstractContextManager[None]:
        """A context for one step, within which ``enter`` is called where each of ``STEP_PHASES``
        begins, in order: "optimizer" where the last backward of the step returns, so that the
        gradient norm belongs to it. For traces and peaks of untimed steps."""
        return self.marked_backward(trained, enter, behind="optimizer")

    @contextlib.contextmanager
    def marked_backward(self, trained: TrainingRun, enter: Enter, behind: str) -> Iterator[None]:
        """``marks`` by watching accelerate's ``backward`` alone; ``behind`` is the phase that
        begins when the last backward of a step returns, empty where the engine marks it itself."""
        accelerator = trained.accelerator
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

    # ---- what is held ----

    def optimized(self, trained: TrainingRun) -> list[torch.Tensor]:
        """The tensors that the optimizer updates on this rank: parameters, or pieces of them, such
        as flat float32 masters. For evidence: their types, elements and bytes."""
        groups = trained.inner_optimizer.param_groups
        return [p for group in groups for p in group["params"]]

    def arrivals(self, trained: TrainingRun) -> list[int]:
        """Bytes of each tensor in which gradients arrive in backward: of one parameter, or of
        several that are reduced together."""
        return [w.numel() * w.element_size() for w in self.optimized(trained)]

    def shards(self, trained: TrainingRun) -> Iterator[tuple[int, torch.Tensor]]:
        """(index, tensor) of what ``optimized`` has, in the order of the trained parameters and one
        at a time: where they are swapped ("swapped_weights") each is in memory until the next is
        asked for. The average of the weights follows these after each step."""
        yield from enumerate(p for p in trained.module.parameters() if p.requires_grad)

    def state_of(self, trained: TrainingRun, shard: torch.Tensor) -> Mapping[str, Any]:
        """What the optimizer keeps of one of the ``shards``, as this rank has it; empty where it
        keeps nothing."""
        return trained.inner_optimizer.state.get(shard, {})

    def receivers(self, trained: TrainingRun) -> Sequence[torch.Tensor]:
        """The leaves at which autograd's gradients arrive on this rank: a trace that watches them
        knows what is a gradient from its first moment on."""
        return [p for p in trained.module.parameters() if p.requires_grad]

    def fragments(self, trained: TrainingRun, *, copies: bool = False) -> Iterator[Fragment]:
        """Where this rank's share of each trained parameter lies in its ``shards``. Over all ranks
        each element occurs once: where all hold everything, only the main process yields;
        ``copies``: also on ranks whose share another has as well. The averaged weights are put
        together from these at the end of a training."""
        if copies or trained.accelerator.is_main_process:
            named = [(n, p) for n, p in trained.module.named_parameters() if p.requires_grad]
            for index, (name, p) in enumerate(named):
                yield Fragment(name, index, 0, p.numel(), 0)

    def whole(self, trained: TrainingRun, parameters: Sequence[Any]) -> Iterator[Any]:
        """The parameters one after the other, each whole until the next is asked for. All ranks
        call it and go through it to the end, since gathering one is a collective. Where ranks have
        other parameters each, these are of ``everywhere``."""
        yield from parameters

    def everywhere(self, trained: TrainingRun) -> Mapping[str, Any]:
        """Name -> each parameter of the whole model, in one order on all ranks; of one that other
        ranks alone have, what tells its ``shape``, ``dtype`` and ``requires_grad``."""
        return dict(trained.module.named_parameters())

    def part(self, parameter: Any) -> torch.Tensor:
        """What this rank stores of a parameter between two steps, for checksums; may be empty."""
        return parameter

    def shape(self, parameter: Any) -> torch.Size:
        """The shape of the whole parameter, whatever part of it is here."""
        return parameter.shape

    def held(self, trained: TrainingRun) -> TensorInventory:
        """What this rank holds between two steps, by category. A trace names storages by it before
        and after each traced step; what is left out shows as temporaries or activations."""
        parameters = [t for p in trained.module.parameters() for t in stored(p.data)]
        return TensorInventory(
            {
                "parameters": [*parameters, *trained.module.buffers()],
                "optimizer_state": tensors(trained.inner_optimizer),
                "gradients": [p.grad for p in trained.module.parameters() if p.grad is not None],
            }
        )

    def save(self, trained: TrainingRun, path: Path) -> None:
        """Write the training's state into the folder ``path``, which may not exist yet; all ranks
        call it. What strategies keep is saved beside it."""
        trained.accelerator.save_state(str(path))

    def load(self, trained: TrainingRun, path: Path) -> None:
        """Read what ``save`` wrote, into prepared objects; all ranks call it."""
        trained.accelerator.load_state(str(path))

    def makers(self) -> tuple[AllocationScope, ...]:
        """Methods of the engine's library during which all that is allocated is of one category;
        for buffers that ``held`` cannot show, because they live only within a step."""
        return ()

    # ---- proof and prediction ----

    def observe(self, trained: TrainingRun) -> contextlib.AbstractContextManager[Any]:
        """Entered for one untimed step behind the measured ones; what it yields is kept in
        ``trained.observed.engine``. What a step alone can show (what was alive in backward, who
        wrote the state) is noted here, for ``evidence``."""
        return contextlib.nullcontext()

    def told(self, trained: TrainingRun) -> EngineReport:
        """What the engine's library says of itself after the last step, for the audit."""
        scaler = trained.accelerator.scaler
        return EngineReport(loss_scale=None if scaler is None else float(scaler.get_scale()))

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        """Facts read back from ``trained`` after its last step that show the engine in force, as
        plain data for the result file. Every rank calls it, to its end. Must be given.

        Raises:
            NotInForce: it is not in force (``strategies.base.demand``); the row is then void.
        """
        raise NotImplementedError

    def unlike(self, launch: RunContext) -> Sequence[int]:
        """Ranks that hold and do other things than each other, of which every other rank is like
        one; a prediction is of the fullest of them."""
        return (0,)

    def foresee(self, launch: RunContext) -> None:
        """Find out once what each of the ``unlike`` ranks would of the model, and keeps."""

    def standing_for(self, rank: int) -> Engine:
        """The engine whose ``imitation`` stands for that one of the ``unlike`` ranks."""
        return self

    @property
    def waits(self) -> Fraction:
        """How long a rank waits in a step for those through which its micro batches pass before
        and after, as a multiple of what it computes forward and backward; 0: all work at once."""
        return Fraction(0)

    def imitation(self) -> TraceAdapter:
        """How a prediction stands in for its launch; the default runs the engine as it is, with a
        fake process group."""
        return TraceAdapter()


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a strategy may know of what is trained, how, and of the recipe it is part of.

    ``simulated``: one process stands for rank 0 of ``processes``, and collectives move nothing.
    ``sequence``: so many neighbouring ranks have a part each of the same samples' tokens;
    ``tensor``: of the same weights.
    ``traits`` are the words that the engine and all parts of the recipe say of themselves
    (``Strategy.traits``), so that a part can refuse an effect without knowing who has it.
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
        """How the engine uses the ranks, and the recipe beside it."""
        return self.engine.layout(self.processes).cut(self.sequence).cut(self.tensor, "tensor")


class NoOptimizer:
    """In the place of an optimizer where there is none: it updates nothing and keeps nothing."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[Any, Any] = {}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What a batch of drawn samples takes: ``samples`` in it, ``evaluations`` of the guided model
    from noise to the samples, and the ``guidance`` scale (1: none)."""

    samples: int
    evaluations: int
    guidance: float


@dataclass(kw_only=True)
class TrainingRun:
    """What evidence is read from: the objects of a run after its last step.

    ``model`` and ``optimizer`` are what ``Accelerator.prepare`` returned, ``module`` is the bare
    model inside. Counts are the loop's own, and evidence compares the engine's with them:
    ``optimizer_steps`` of the whole training, ``resumed_steps`` of them by an earlier process,
    ``micro_steps`` by this one. ``ops`` names every operator of one whole step, as torch's
    dispatcher spells them; empty where no step was traced (a training run). ``observed`` is what
    one step showed that was watched for evidence, None where none was. Where samples are drawn
    (``sampling``) a step is a batch of them, and a micro step a call of the model. Where gradients
    are gone before the loop could look at them, whoever takes them sets ``gradient_norm``: the
    global norm of the backward that just ended. Who adds to the true loss sets ``supervise``: given
    the loss of each sample as a function of a way to predict, that way, and the conditions of a
    micro batch, it returns the scalar that is differentiated.
    """

    accelerator: Any
    model: Any
    module: nn.Module
    optimizer: Any
    launch: RunContext
    settings: Settings
    attached: dict[str, Attachment]
    optimizer_steps: int = 0
    resumed_steps: int = 0
    micro_steps: int = 0
    sampling: Sampling | None = None
    gradient_norm: Callable[[], Any] | None = None
    supervise: Callable[[Callable[[Any], Any], Any, Mapping[str, Any]], Any] | None = None
    ops: set[str] = field(default_factory=set)
    observed: Observed | None = None

    @property
    def engine(self) -> Engine:
        """Who moves gradients and holds the shards."""
        return self.launch.engine

    @property
    def subject(self) -> Subject:
        """What is trained."""
        return self.launch.subject

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that owns the state, below accelerate's and DeepSpeed's wrappers."""
        optimizer = self.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        return optimizer

    def cut(self, samples: torch.Tensor) -> torch.Tensor:
        """This rank's part of whole samples: all of them, unless ranks share their tokens."""
        layout = self.launch.layout
        if layout.sequence == 1:
            return samples
        part = layout.part(self.accelerator.process_index)
        return self.subject.cut(samples, part, layout.sequence)

    def blocks(self) -> list[nn.Module]:
        """The model's blocks, in the order in which they run."""
        return self.subject.blocks(self.module)

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the blocks' linear layers that this rank has: all, unless it has some blocks."""
        if "stages" not in self.launch.traits:
            return self.subject.linears
        here = dict(self.module.named_modules())
        return tuple(name for name in self.subject.linears if name in here)

    def optimized(self) -> list[torch.Tensor]:
        """The tensors that the optimizer updates on this rank: parameters, or float32 masters."""
        return self.engine.optimized(self)
