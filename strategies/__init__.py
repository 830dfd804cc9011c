"""Strategy implementations and their catalog.

``CATALOG`` maps a strategy's name to its class. This package does not import ``harness``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from strategies import launch_file, recipe
from strategies.base import LazyTable, load
from strategies.optimizers.table import TABLE
from strategies.recipe import Recipe
from strategies.workloads import SAMPLE, TRAIN

__all__ = ["CATALOG", "parse"]


def _made(place: str, names: Iterable[str]) -> dict[str, Any]:
    """Return name -> call that makes the strategy by the function at ``place``."""
    return {name: partial(lambda name: load(place)(name), name) for name in names}


class Catalog(LazyTable):
    """Strategies by name; ``@PATH`` is the sharding of a user's own launch file."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and name.startswith("@"))

    def __getitem__(self, name: str) -> Any:
        if name.startswith("@"):
            from strategies.sharding import users_kind

            return users_kind(name)
        return super().__getitem__(name)


CATALOG = Catalog(
    {
        **_made("strategies.sharding:sharding_kind", launch_file.names()),
        "fp32": "strategies.precision.mixed:Fp32",
        "tf32": "strategies.precision.mixed:Tf32",
        "bf16": "strategies.precision.mixed:Bf16",
        "bf16_master": "strategies.precision.mixed:Bf16Master",
        "bf16_pure": "strategies.precision.mixed:Bf16Pure",
        "fp16": "strategies.precision.mixed:Fp16",
        "fp16_pure": "strategies.precision.mixed:Fp16Pure",
        "fp8": "strategies.precision.fp8:Fp8",
        "block_swap": "strategies.streaming.block_swap:BlockSwap",
        "cast": "strategies.adapters.cast:Cast",
        "lora": "strategies.adapters.lora:Lora",
        "dora": "strategies.adapters.lora:Dora",
        "qlora": "strategies.adapters.lora:Qlora",
        "lokr": "strategies.adapters.lora:Lokr",
        "loha": "strategies.adapters.lora:Loha",
        "oft": "strategies.adapters.lora:Oft",
        "head": "strategies.adapters.partial:Head",
        "difffit": "strategies.adapters.partial:DiffFit",
        "controlnet": "strategies.adapters.controlnet:ControlNet",
        "prune": "strategies.sparsity.prune:Prune",
        "prune_structured": "strategies.sparsity.prune:PruneStructured",
        "sparse24": "strategies.sparsity.sparse24:Sparse24",
        "int8": "strategies.sampling.quantised:Int8",
        "float8": "strategies.sampling.quantised:Float8",
        "nf4": "strategies.sampling.quantised:Nf4",
        "palette": "strategies.sampling.palette:Palette",
        "attend": "strategies.activations.attend:Attend",
        "sp": "strategies.parallel.sequence.strategy:SequenceParallel",
        "tp": "strategies.parallel.tensor.strategy:TensorParallel",
        "checkpoint": "strategies.activations.checkpoint:Checkpoint",
        "offload_activations": "strategies.activations.offload_activations:OffloadActivations",
        "compile": "strategies.activations.compile:Compile",
        "cross_entropy": "strategies.losses.cross_entropy:CrossEntropy",
        "distill": "strategies.distillation.distill:Distill",
        **_made("strategies.optimizers.table:optimizer_kind", TABLE),
        "optimizer_in_backward": "strategies.step.optimizer_in_backward:OptimizerInBackward",
        "backward": "strategies.step.backward:Backward",
        "accumulate": "strategies.step.backward:Accumulate",
        "compress": "strategies.communication.compress:Compress",
        "topk": "strategies.communication.topk:TopK",
        "sparse_embedding": "strategies.communication.sparse_embedding:SparseEmbedding",
        "ema": "strategies.step.ema:Ema",
    }
)
"""Name -> strategy class. The first look-up of a name imports its module."""


def parse(text: str, *, ema: bool = True, workload: str = TRAIN) -> Recipe:
    """Return the recipe that ``text`` names.

    Open slots get defaults: fp32, adamw and (if ``ema``) the weight average in training;
    fp32 in sampling.

    Raises:
        recipe.RecipeError: an unknown strategy or parameter, or a bad value.
        base.Conflict: two strategies for one place, or no sharding strategy.
    """
    if workload == SAMPLE:
        return recipe.parse(text, CATALOG, defaults=(CATALOG["fp32"](),))
    average = CATALOG["ema"](**({} if ema else {"place": "none"}))
    return recipe.parse(text, CATALOG, defaults=(CATALOG["fp32"](), CATALOG["adamw"](), average))
