"""The contract of an engine, who moves gradients and holds the shards of a run; and the run.

A launch file names its engine by accelerate's distributed type; ``strategies.engines`` has one file
each. An engine holds the facts of its launch file and nothing of a run: what it does to a run's
objects it is given with them (``Trained``). The defaults are those of plain torch, where every rank
holds whole parameters and accelerate does the rest; an engine overrides what it does otherwise.
Strategies ask its traits (``strategies.base.TRAITS``), never its name.

``Launch`` and ``Trained`` stand here because an engine is part of both and is given both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from strategies.base import Attachment, Settings
from strategies.evidence.stored import stored, tensors
from strategies.launch_file import LaunchFile
from strategies.sizes import Sizes
from strategies.subject import Subject

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "STEP_PHASES",
    "Books",
    "Engine",
    "Fragment",
    "Holdings",
    "Imitation",
    "Launch",
    "Layout",
    "Maker",
    "Told",
    "Trained",
    "Workload",
]

STEP_PHASES = ("forward", "backward", "optimizer")
"""The phases of one optimizer step, in order; with several micro batches the first two alternate.
The phases of a whole run are ``harness.phases.RUN_PHASES``."""
Enter = Callable[[str], None]
"""Called with one of ``STEP_PHASES`` where that phase begins."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How ranks are used; the product of all degrees is the number of ranks.

    Samples are divided by ``replicate`` and ``shard`` alone: ranks that differ in the others work
    on the same samples. Ranks are counted as torch's device meshes count them, ``tensor`` fastest,
    then ``sequence``, ``shard``, ``replicate`` and ``pipeline``.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Processes of the job."""
        return self.data * self.tensor * self.sequence * self.pipeline

    @property
    def data(self) -> int:
        """The data-parallel degree: into how many shares a global batch is cut."""
        return self.replicate * self.shard

    def share(self, rank: int) -> int:
        """Which of the ``data`` shares of a global batch ``rank`` works on."""
        return rank // (self.tensor * self.sequence) % self.data


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What an engine must know of the training before it is prepared.

    ``micro_batch`` in samples a rank, ``clip`` the limit of the gradient norm (0: none), ``sizes``
    those of the edited model, ``scratch`` a folder to swap to.
    """

    micro_batch: int
    clip: float
    sizes: Sizes
    scratch: Path


class Fragment(NamedTuple):
    """A piece of the parameter ``name`` in this rank's ``shard``: ``numel`` elements from ``start``
    of the shard, which are those from ``offset`` of the flattened parameter."""

    name: str
    shard: int
    start: int
    numel: int
    offset: int


class Holdings(NamedTuple):
    """What a rank holds between two steps: category (``harness.memory.categories``) -> tensors.

    ``hidden`` are bytes of communication buckets that no tensor shows, but for the storages
    ``seen`` of them.
    """

    tensors: dict[str, list[Any]]
    hidden: int = 0
    seen: frozenset[int] = frozenset()


class Maker(NamedTuple):
    """A method of a library: what is allocated while it runs is of ``category``, in ``phases`` of
    the step, or in all where there are none."""

    owner: Any
    method: str
    category: str
    phases: tuple[str, ...] = ()


class Told(NamedTuple):
    """What an engine says of itself after a run; None where it says nothing.

    ``steps``: optimizer steps taken. ``clip``: the limit of the gradient norm that it applies.
    ``config``: the settings that it ran with. ``swapped_bytes``: what lies in files.
    """

    steps: int | None = None
    clip: float | None = None
    accumulation: int | None = None
    micro_batch: int | None = None
    loss_scale: float | None = None
    config: dict[str, Any] | None = None
    swapped_bytes: int = 0


class Books(Protocol):
    """Where an imitation writes what no op of a traced training shows."""

    def hold(self, pool: str, size: int, op: str, category: str) -> Callable[[], None]:
        """Bytes of "device", "host" or "nvme" that are held from now on; call the result to free
        them."""

    def tag(self, category: str, tensors: Iterable[Any]) -> None:
        """Say what tensors that live now are."""

    def move(self, category: str, source: str, target: str) -> int:
        """All of ``category`` that is held in ``source`` was in ``target`` all the time; the bytes
        of it that are held now."""

    def work(self, phase: str, kind: str, size: int) -> None:
        """Bytes that were moved: kind is overlapped, host or nvme (``predict.roofline.Work``)."""


class Imitation:
    """How a prediction stands in for an engine's launch, on tensors without storage.

    ``ranks``: whether the engine wants a process group. ``device`` below is the device type whose
    tensors stand for the GPU's.
    """

    ranks: ClassVar[bool] = True
    shapes_in: ClassVar[tuple[str, ...]] = ()
    """Endings of the library's files that remember shapes as tensors on ``meta``."""

    def environment(self, launch: Launch) -> dict[str, str]:
        """What accelerate's launcher would add to a rank's environment for this engine."""
        return {}

    def begin(self, launch: Launch, device: str) -> None:
        """The engine's own view of the device, before accelerate asks for it."""

    def made(self, accelerator: Any, launch: Launch) -> None:
        """Accelerate's state as it would be on GPUs."""

    def stand_ins(self, books: Books) -> list[contextlib.AbstractContextManager[Any]]:
        """What must be replaced for the length of the prediction."""
        return []

    def prepared(self, trained: Trained, books: Books) -> Callable[[], None]:
        """What stands beside the prepared objects; the result is called behind the last step."""
        return lambda: None


@dataclass(frozen=True)
class Engine:
    """What the engine of a launch file does.

    ``kinds`` are accelerate's distributed types that name it, ``needs`` what the machine must have
    (the words of ``harness.system.requirements``), ``modules`` what a step will import. ``buckets``
    is the category of a measured step in which its communication buckets count,
    ``host_adamw_class`` the class that ``host_adamw`` makes.
    """

    kinds: ClassVar[tuple[str, ...]]
    modules: ClassVar[tuple[str, ...]] = ()
    buckets: ClassVar[str] = "workspace"
    host_adamw_class: ClassVar[str] = ""

    file: LaunchFile

    @classmethod
    def of(cls, file: LaunchFile) -> Engine:
        """The engine of a launch file of its kind.

        Raises:
            LaunchFileError: the file lacks what the engine must know, or names a file that does.
        """
        return cls(file)

    # ---- facts of the launch file ----

    @property
    def needs(self) -> tuple[str, ...]:
        return ()

    @property
    def traits(self) -> frozenset[str]:
        """What strategies may have to know of it; the words are listed in TRAITS."""
        return frozenset()

    def layout(self, ranks: int) -> Layout:
        """How so many ranks are used."""
        return Layout(replicate=ranks)

    def place(self, what: str) -> str:
        """Where the "optimizer" or the "parameters" are kept: device, cpu or nvme."""
        return "device"

    def refuses(self, launch: Launch) -> str | None:
        """Why it cannot run under ``launch``, with the way out; None if it can."""
        return None

    def environment(self, device: str) -> dict[str, str]:
        """Variables that its processes need beside the launch file."""
        # torchrun's path drops the launch file's use_cpu.
        return {"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}

    def accelerator_kwargs(self, launch: Launch) -> dict[str, Any]:
        """Keyword arguments for ``Accelerator``."""
        return {"cpu": True} if launch.device == "cpu" else {}

    @staticmethod
    def group(backend: str) -> dict[str, Any]:
        """A process group of this backend, as a keyword argument for ``Accelerator``."""
        from accelerate import InitProcessGroupKwargs

        return {"kwargs_handlers": [InitProcessGroupKwargs(backend=backend)]}

    def remarks(self, launch: Launch, sizes: Sizes | None) -> list[str]:
        """What a reader of such a row should know though it can run; ``sizes`` are the model's,
        None where they are not known without torch."""
        return []

    # ---- set-up ----

    def configure(self, accelerator: Any, work: Workload) -> None:
        """Settle what the launch file left open."""

    def sixteen_bits(self, accelerator: Any, *, master: bool = True, scale: int = 0) -> None:
        """Settle how 16-bit weights are kept where the engine keeps them: with a float32
        ``master`` or without, and the first loss ``scale`` of float16 (a power of two)."""

    def host_adamw(self, params: list[Any], settings: Settings) -> Any:
        """AdamW for an optimizer in host memory ("host_optimizer")."""
        raise NotImplementedError

    def prepare(
        self, accelerator: Any, module: Any, make_optimizer: Callable[[list[Any]], Any]
    ) -> tuple[Any, Any]:
        """The model and the optimizer as they are trained. ``make_optimizer`` is called with the
        trained parameters once they are what the optimizer will step."""
        optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad])
        return accelerator.prepare(module, optimizer)

    def ready(self, trained: Trained) -> None:
        """Every part is attached: the last thing before the first step."""

    # ---- one optimizer step ----

    def micro_steps(
        self,
        trained: Trained,
        batches: Iterable[Any],
        loss_of: Callable[[Any], Any],
        arrived: Callable[[], None],
    ) -> Iterator[Any]:
        """Forward, backward and, behind the last micro batch, the optimizer's step; the loss of
        each micro batch. ``arrived`` is called when all gradients of the step are there."""
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

    def norm(self, trained: Trained) -> Any:
        """Global norm of the gradients as they are."""
        import torch

        # clip_grad_norm_ with an infinite limit would still multiply every gradient by one.
        grads = [p.grad for p in trained.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(
            [g.coalesce().values() if g.is_sparse else g for g in grads]
        )

    def clip(self, trained: Trained, limit: float) -> Any:
        """Clip the gradients to ``limit``; their norm before. Not called where the engine clips by
        itself ("own_clipping")."""
        parameters = [p for p in trained.module.parameters() if p.grad is not None]
        return trained.accelerator.clip_grad_norm_(parameters, limit)

    def mean(self, trained: Trained, values: Any) -> Any:
        """The mean over all ranks of a tensor that each has; all ranks call it."""
        return trained.accelerator.reduce(values, reduction="mean")

    def marks(self, trained: Trained, enter: Enter) -> contextlib.AbstractContextManager[None]:
        """While it lasts, ``enter`` is told where forward, backward and optimizer begin: the
        optimizer's part where the last backward returns (the gradient norm belongs to it)."""
        return self.marked_backward(trained, enter, behind="optimizer")

    @contextlib.contextmanager
    def marked_backward(self, trained: Trained, enter: Enter, behind: str) -> Iterator[None]:
        """The same where only accelerate's ``backward`` is watched; ``behind`` is the phase that
        begins when the last of a step returns, empty where another mark says so."""
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

    def optimized(self, trained: Trained) -> list[torch.Tensor]:
        """The tensors that the optimizer updates on this rank: parameters, or pieces of them."""
        groups = trained.inner_optimizer.param_groups
        return [p for group in groups for p in group["params"]]

    def shards(self, trained: Trained) -> Iterator[tuple[int, torch.Tensor]]:
        """The same in the order of the trained parameters, one at a time: where they are swapped
        ("swapped_weights") each is in memory until the next is asked for."""
        yield from enumerate(p for p in trained.module.parameters() if p.requires_grad)

    def fragments(self, trained: Trained) -> Iterator[Fragment]:
        """Where this rank's share of each trained parameter lies in its ``shards``: each element
        is one rank's."""
        if trained.accelerator.is_main_process:
            named = [(n, p) for n, p in trained.module.named_parameters() if p.requires_grad]
            for index, (name, p) in enumerate(named):
                yield Fragment(name, index, 0, p.numel(), 0)

    def whole(self, trained: Trained, parameters: Sequence[Any]) -> Iterator[Any]:
        """The parameters one after the other, each whole until the next; all ranks call it."""
        yield from parameters

    def part(self, parameter: Any) -> torch.Tensor:
        """What this rank stores of a parameter."""
        return parameter

    def shape(self, parameter: Any) -> torch.Size:
        """The shape of the whole parameter."""
        return parameter.shape

    def held(self, trained: Trained) -> Holdings:
        """What lives between two steps."""
        parameters = [t for p in trained.module.parameters() for t in stored(p.data)]
        return Holdings(
            {
                "parameters": [*parameters, *trained.module.buffers()],
                "optimizer_state": tensors(trained.inner_optimizer),
                "gradients": [p.grad for p in trained.module.parameters() if p.grad is not None],
            }
        )

    def makers(self) -> tuple[Maker, ...]:
        """Methods of the engine's library that say what they allocate."""
        return ()

    # ---- proof and prediction ----

    def told(self, trained: Trained) -> Told:
        """What it says of itself."""
        scaler = trained.accelerator.scaler
        return Told(loss_scale=None if scaler is None else float(scaler.get_scale()))

    def evidence(self, trained: Trained) -> dict[str, Any]:
        """Facts read back that show it in force; NotInForce where it is not."""
        raise NotImplementedError

    def imitation(self) -> Imitation:
        """How a prediction stands in for its launch."""
        return Imitation()


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a strategy may know of what is trained, how, and of the recipe it is part of.

    ``simulated``: one process stands for rank 0 of ``processes``, and collectives move nothing.
    ``traits`` are the words that the engine and all parts of the recipe say of themselves
    (``Strategy.traits``), so that a part can refuse an effect without knowing who has it.
    """

    sharding: str
    engine: Engine
    subject: Subject
    device: str
    processes: int
    accumulation: int = 1
    clips: bool = False
    simulated: bool = False
    traits: frozenset[str] = frozenset()

    @property
    def layout(self) -> Layout:
        """How the engine uses the ranks."""
        return self.engine.layout(self.processes)


@dataclass(kw_only=True)
class Trained:
    """What evidence is read from: the objects of a run after its last step.

    ``model`` and ``optimizer`` are what ``Accelerator.prepare`` returned, ``module`` is the bare
    model inside. Counts are the loop's own, and evidence compares the engine's with them:
    ``optimizer_steps`` of the whole training, ``resumed_steps`` of them by an earlier process,
    ``micro_steps`` by this one. ``ops`` names every operator of one whole step, as torch's
    dispatcher spells them; empty where no step was traced (a training run). Where gradients are
    gone before the loop could look at them, whoever takes them sets ``gradient_norm``: the global
    norm of the backward that just ended.
    """

    accelerator: Any
    model: Any
    module: nn.Module
    optimizer: Any
    launch: Launch
    settings: Settings
    attached: dict[str, Attachment]
    optimizer_steps: int = 0
    resumed_steps: int = 0
    micro_steps: int = 0
    gradient_norm: Callable[[], Any] | None = None
    ops: set[str] = field(default_factory=set)

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

    def blocks(self) -> list[nn.Module]:
        """The model's blocks, in the order in which they run."""
        return self.subject.blocks(self.module)

    def optimized(self) -> list[torch.Tensor]:
        """The tensors that the optimizer updates on this rank: parameters, or float32 masters."""
        return self.engine.optimized(self)
