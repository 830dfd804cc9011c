"""The words that every part of a recipe uses: places, traits, settings, and what can go wrong."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class LazyTable(UserDict[str, Any]):
    """Name -> class, written "module:Class" or as a ``partial`` that makes the class. The first
    look-up of a name imports its module; ``in``, ``len`` and iteration over names import nothing.
    """

    def __getitem__(self, name: str) -> Any:
        found = self.data[name]
        if isinstance(found, str):
            module, _, kind = found.partition(":")
            found = self.data[name] = getattr(import_module(module), kind)
        elif isinstance(found, partial):
            found = self.data[name] = found()
        return found


class Slot(IntEnum):
    """The places a training step, or a batch of drawn samples, leaves open, in the order in which
    they are filled."""

    SHARD = 0
    PRECISION = 1
    SWAP = 2
    CAST = 3
    ADAPT = 4
    SPARSIFY = 5
    STORE = 6
    ATTEND = 7
    SEQUENCE = 8
    TENSOR = 9
    RECOMPUTE = 10
    OFFLOAD = 11
    COMPILE = 12
    LOSS = 13
    OPTIMIZE = 14
    STEP = 15
    ACCUMULATE = 16
    COMPRESS = 17
    AVERAGE = 18
    GUIDE = 19


TRAITS = {
    "frozen_weights": "some of the model's own weights take no gradient",
    "frozen_blocks": "backward does not reach the blocks",
    "frozen_matrices": "no matrix of the blocks takes a gradient",
    "other_products": "a step's products are not those of the whole model, trained whole",
    "replaced_layers": "the blocks' linear layers are replaced by layers of another kind or size",
    "masked_weights": "some weights stay zero, by masks that the first weights decided",
    "quantized_weights": "weights are stored in fewer bits than they compute in",
    "float_adapters": "adapters are float32, whatever the type of the weights beside them",
    "packed_weights": "weights that share a byte are tensors of a class of their own",
    "weight_norms": "norms of the frozen weights are part of what is computed",
    "streams_weights": "some blocks' weights are on the device for these blocks alone",
    "compiled": "the blocks run as compiled graphs",
    "captured": "calls of the model are replayed graphs of kernels",
    "compiled_whole": "the whole model is one compiled graph",
    "half_compute": "matrix products take operands of 16 bits",
    "pure_bf16": "weights, gradients and the optimizer's weights are bfloat16, with no master",
    "moves_activations": "what is kept for backward leaves the device",
    "scales_gradients": "gradients are multiplied by a loss scale until the optimizer steps",
    "recomputes": "activations are dropped in forward and computed again in backward",
    "doubles_tokens": "some blocks hand on twice the tokens",
    "cut_samples": "each rank works on a part of its samples' tokens",
    "cut_queries": "attention takes a part of the queries and all keys",
    "flash_alone": "attention is computed a part of the keys at a time, by the flash kernel",
    "cut_weights": "each rank holds and multiplies with a part of the blocks' matrices",
    "edits_gradients": "gradients are changed between backward and the optimizer",
    "early_gradients": "gradients are used within backward, before anything could change them",
    "frees_gradients": "a gradient is gone before the backward pass ends",
    "hooks_allreduce": "DDP's one communication hook is taken by the optimizer",
    "rounds_state": "the optimizer's moments are rounded, so a zero gradient may move a weight",
    "whole_gradients": "the optimizer must be stepped over all parameters at once",
    "sparse_gradients": "a gradient is a sparse tensor",
    "takes_sparse": "the optimizer takes sparse gradients",
    "own_state": "the optimizer's state is not two float moments a parameter",
    # Of the workload:
    "sampling": "samples are drawn: there is no backward, no gradient and no optimizer",
    # Of engines:
    "one_process": "one process trains, and sends nothing",
    "replicas": "gradients of whole replicas are averaged by an all-reduce that a hook can replace",
    "shards": "each rank keeps a share of what others keep the rest of",
    "flat_weights": "the optimizer updates flat pieces, in which parameters have no shape",
    "float_master": "16-bit weights have a float32 master, which the optimizer updates",
    "split_parameters": "parameters are whole only while they are used",
    "rounded_gathers": "weights are rounded to fewer bits on their way to other ranks",
    "stages": "each rank has some of the blocks, and micro batches pass from rank to rank",
    "gathers_ahead": "memory of weights that were gathered is free once the device has used them",
    "dtensor_weights": "parameters, gradients and the optimizer's state are DTensors: rows of each",
    "held_gradients": "a gradient that was averaged is held until backward has ended",
    "host_weights": "weights, gradients and optimizer state wait in host memory",
    "dealt_optimizer": "pieces of the optimizer are dealt to host memory or to the device",
    "host_optimizer": "the optimizer's state is kept, and stepped, outside the device",
    "swapped_weights": "the optimizer's weights are read into memory one piece at a time",
    "own_step": "the engine takes the optimizer's step by itself, behind its backward",
    "own_clipping": "the engine clips gradients by itself",
}
"""Trait -> meaning. A part that cannot work beside one refuses the trait, never a name."""


ALTERS = {
    "rounding": "operands of products, or weights, are rounded to a shorter type",
    "forward": "the forward pass computes something else",
    "gradients": "gradients are not those of all weights, or are changed on their way",
    "update": "the optimizer writes something else than AdamW would",
    "model": "another model takes the place of the one that is named",
}
"""What a strategy may alter by design -> meaning. From it follows how far a row's first step, or
all of its steps, may be from the reference's (``harness.report.figures.parity``)."""


class Parity(Enum):
    """How a recipe's losses relate to the reference row's.

    EXACT: the same computation, so equal losses within float rounding.
    BY_DESIGN: another computation on purpose (lower precision, fewer weights): the distance is
    measured and shown, but does not make the row wrong.
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

    def weights(self) -> Iterable[torch.Tensor]:
        """Those of ``tensors`` that are weights of a model, so that they count as parameters."""

    def averages(self) -> Sequence[torch.Tensor]:
        """Averages of the weights, laid out as ``Engine.shards``; empty where it keeps none."""

    def hosted(self) -> Iterable[torch.Tensor]:
        """Those of ``tensors`` that were put into host memory, where a device may be host memory
        itself and their device cannot tell."""

    def makers(self) -> Iterable[Any]:
        """Methods that allocate in another place than that of their operands
        (``strategies.inventory.AllocationScope``)."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, saved beside the engine's checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave on a rank of the same number."""

    def recut(self, states: Sequence[dict[str, Any]], pieces: Sequence[Sequence[Any]]) -> None:
        """Restore it from what all ranks of another number gave; ``pieces`` are the fragments of
        the parameters that each of those ranks had (``strategies.inventory.Fragment``).

        Raises:
            BadInput: it cannot be cut anew.
        """


class Watcher:
    """An attachment that holds no tensors and has nothing to resume; a base for those."""

    def after_step(self) -> None:
        """Nothing to do."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Nothing is held."""
        return ()

    def weights(self) -> Iterable[torch.Tensor]:
        """No model is kept."""
        return ()

    def averages(self) -> Sequence[torch.Tensor]:
        """No average is kept."""
        return ()

    def hosted(self) -> Iterable[torch.Tensor]:
        """Nothing is in host memory."""
        return ()

    def makers(self) -> Iterable[Any]:
        """What is made is where its operands are."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    def recut(self, states: Sequence[dict[str, Any]], pieces: Sequence[Sequence[Any]]) -> None:
        """Nothing to restore; refused where a subclass keeps something."""
        if any(states):
            raise BadInput(
                f"what {type(self).__name__} keeps is of {len(states)} processes, and cannot be "
                f"cut anew; resume with --processes {len(states)}"
            )


# ---- sizes ----
# What the sizes of an engine's buffers follow from, and what an allocator makes of a size.


class Sizes(NamedTuple):
    """What sizes of buffers follow from, in elements: of all trained parameters, of the largest
    block, of the largest parameter and of the largest one-dimensional one; ``weights`` of each
    trained parameter that is no bias, where they are known before the model is built. ``here``: the
    trained elements of a model that stands for a deeper one, whose total is ``total``; else 0."""

    total: int
    block: int
    tensor: int
    bias: int
    weights: tuple[int, ...] = ()
    here: int = 0


def pinned_block(size: int) -> int:
    """Bytes of pinned host memory that torch takes for ``size`` bytes: the next power of two.

    Source: torch 2.13, ATen/core/CachingHostAllocator.h (allocate), with the default settings.
    """
    return 1 << (size - 1).bit_length() if size else 0
