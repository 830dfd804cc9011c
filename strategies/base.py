"""The contract of a strategy: one technique, the place it fills, and how it proves itself.

A strategy imports torch only inside the methods that touch tensors, so that a recipe can be
parsed, refused and listed in milliseconds and on a machine without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "TRAITS",
    "Attachment",
    "BadInput",
    "Conflict",
    "Launch",
    "NotInForce",
    "Parity",
    "Settings",
    "Slot",
    "Strategy",
    "Trained",
    "Watcher",
    "demand",
]


class Slot(IntEnum):
    """The places a training step leaves open, in the order in which they are filled."""

    SHARD = 0
    PRECISION = 1
    ADAPT = 2
    SPARSIFY = 3
    ATTEND = 4
    RECOMPUTE = 5
    OFFLOAD = 6
    COMPILE = 7
    OPTIMIZE = 8
    STEP = 9
    ACCUMULATE = 10
    COMPRESS = 11
    AVERAGE = 12


TRAITS = {
    "frozen_weights": "some of the model's own weights take no gradient",
    "frozen_blocks": "backward does not reach the blocks",
    "frozen_matrices": "no matrix of the blocks takes a gradient",
    "other_products": "a step's products are not those of the whole model, trained whole",
    "replaced_layers": "the blocks' linear layers are replaced by layers of another kind or size",
    "quantized_weights": "weights are stored in fewer bits than they compute in",
    "compiled": "the blocks run as compiled graphs",
    "half_compute": "matrix products take operands of 16 bits",
    "pure_bf16": "weights, gradients and the optimizer's weights are bfloat16, with no master",
    "moves_activations": "what is kept for backward leaves the device",
    "scales_gradients": "gradients are multiplied by a loss scale until the optimizer steps",
    "recomputes": "activations are dropped in forward and computed again in backward",
    "doubles_tokens": "some blocks hand on twice the tokens",
    "edits_gradients": "gradients are changed between backward and the optimizer",
    "early_gradients": "gradients are used within backward, before anything could change them",
    "frees_gradients": "a gradient is gone before the backward pass ends",
    "hooks_allreduce": "DDP's one communication hook is taken by the optimizer",
    "rounds_state": "the optimizer's moments are rounded, so a zero gradient may move a weight",
    "whole_gradients": "the optimizer must be stepped over all parameters at once",
    "sparse_gradients": "a gradient is a sparse tensor",
    "takes_sparse": "the optimizer takes sparse gradients",
    "own_state": "the optimizer's state is not two float moments a parameter",
}
"""Trait -> meaning. A part that cannot work beside one refuses the trait, never a name."""


class Parity(Enum):
    """How a recipe's losses relate to the reference row's.

    EXACT: the same computation, so equal losses within float rounding.
    BY_DESIGN: another computation on purpose (lower precision, fewer weights): the distance is
    measured and shown, and never held against the row.
    """

    EXACT = "exact"
    BY_DESIGN = "by design"


class BadInput(ValueError):
    """What a person gave cannot be used: one line that names it and the way out. Any other
    ValueError is a fault of ours, and is shown as one."""


class Conflict(BadInput):
    """A recipe that cannot be: two strategies for one place, or one that refuses its launch."""


class NotInForce(AssertionError):
    """A strategy was asked for and its effect could not be read back."""


def demand(fact: bool, message: str) -> None:
    """Raise NotInForce(message) unless ``fact`` holds: the one way evidence fails."""
    if not fact:
        raise NotInForce(message)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a strategy may know of how its processes start and of the recipe it is part of.

    ``offload_optimizer`` and ``offload_param`` are "none", "cpu" or "nvme"; ``zero_stage`` is 0
    outside DeepSpeed; ``engine`` is accelerate's distributed type as the launch file spells it.
    ``simulated``: one process stands for rank 0 of ``processes``, and collectives move nothing.
    ``traits`` are the words that all parts of the recipe say of themselves (``Strategy.traits``),
    so that a part can refuse an effect without knowing who has it.
    """

    sharding: str
    engine: str
    device: str
    processes: int
    zero_stage: int = 0
    offload_optimizer: str = "none"
    offload_param: str = "none"
    accumulation: int = 1
    clips: bool = False
    simulated: bool = False
    traits: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Numbers of the training itself, alike for every engine; the reference's are the defaults.

    ``grad_clip`` 0 clips nothing; ``ema_decay`` 0 keeps no average of the weights.
    """

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 0.0
    ema_decay: float = 0.9999

    @property
    def adam(self) -> dict[str, Any]:
        """What every Adam takes, as torch, torchao, bitsandbytes and DeepSpeed spell it alike."""
        names = {"lr": self.learning_rate, "betas": self.betas, "eps": self.eps}
        return names | {"weight_decay": self.weight_decay}


class Attachment(Protocol):
    """What a strategy keeps alive beside the trained model (the weight average, masks, hooks)."""

    def after_step(self) -> None:
        """Called once after every optimizer step."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Every tensor held, so that the meter can name the bytes."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, saved beside the engine's checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave on a rank of the same number."""


class Watcher:
    """An attachment that holds no tensors and has nothing to resume; a base for those."""

    def after_step(self) -> None:
        """Nothing to do."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Nothing is held."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


@dataclass(kw_only=True)
class Trained:
    """What evidence is read from: the objects of a run after its last step.

    ``model`` and ``optimizer`` are what ``Accelerator.prepare`` returned, ``module`` is the bare
    DiT inside. Counts are the loop's own, and evidence compares the engine's with them:
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
    def engine(self) -> Any | None:
        """The DeepSpeed engine, or None under plain torch."""
        return self.model if hasattr(self.model, "zero_optimization_stage") else None

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that owns the state, below accelerate's and DeepSpeed's wrappers."""
        optimizer = self.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        return optimizer

    def optimized(self) -> list[torch.Tensor]:
        """The tensors that the optimizer updates on this rank: parameters, or float32 masters.

        ZeRO-3 empties the inner optimizer's groups between steps, so its shards are asked for.
        """
        if self.launch.zero_stage == 3:
            return list(self.engine.optimizer.fp32_partitioned_groups_flat)
        return [p for group in self.inner_optimizer.param_groups for p in group["params"]]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One technique. Fields are its parameters; the text form is ``name:field=value,...``."""

    name: ClassVar[str]
    slot: ClassVar[Slot]
    parity: ClassVar[Parity] = Parity.EXACT
    source: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()

    def traits(self) -> frozenset[str]:
        """What other parts may have to know of this one; the words are listed in TRAITS."""
        return frozenset()

    def promise(self) -> Parity:
        """The parity of this strategy with these parameters."""
        return self.parity

    def requires(self, launch: Launch) -> tuple[str, ...]:
        """What the machine must have for these parameters; the words are ``harness.doctor``'s."""
        return self.needs

    def refuses(self, launch: Launch) -> str | None:
        """Why this strategy cannot run under ``launch``, with the way out; None if it can."""
        return None

    def accelerator_kwargs(self, launch: Launch) -> dict[str, Any]:
        """Keyword arguments for ``Accelerator``; a key that two strategies set is a Conflict."""
        return {}

    def configure(self, accelerator: Any, module: nn.Module) -> None:
        """Settle what the engine's config left open, once every part has edited the model."""

    def edit_model(self, module: nn.Module) -> None:
        """Change the bare model in place, before prepare."""

    def make_optimizer(
        self, params: list[nn.Parameter], settings: Settings, launch: Launch
    ) -> torch.optim.Optimizer | None:
        """The optimizer, from the one strategy whose place it is."""
        return None

    def attach(self, trained: Trained) -> Attachment | None:
        """State to keep beside the model, made after prepare."""
        return None

    def evidence(self, trained: Trained) -> dict[str, Any]:
        """Facts read back that show the effect; raise NotInForce where it is missing."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Text form, defaults left out, so that equal strategies have equal text."""
        given = [
            f"{f.name}={_text(getattr(self, f.name))}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return self.name + (":" + ",".join(given) if given else "")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
