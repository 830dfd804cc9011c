"""What a recipe is made of. CATALOG is the table of contents; nothing here imports harness."""

from __future__ import annotations

from strategies import recipe
from strategies.accumulate import Accumulate
from strategies.adafactor import Adafactor
from strategies.adapters import Dora, Lora, Qlora
from strategies.average import Ema
from strategies.backward import Backward
from strategies.base import Strategy
from strategies.compress import Compress
from strategies.controlnet import ControlNet
from strategies.in_backward import OptimizerInBackward
from strategies.low_bit import Adam4bit, Adam8bit, PagedAdam8bit
from strategies.muon import Muon
from strategies.offload_adamw import OffloadAdamW
from strategies.onebit_adam import OneBitAdam
from strategies.optimizers import AdamW
from strategies.partial import DiffFit, Head
from strategies.precision import Bf16, Fp32
from strategies.prune import Prune
from strategies.prune_structured import PruneStructured
from strategies.recipe import Recipe
from strategies.recompute import Checkpoint
from strategies.sgd import Sgd
from strategies.sharding import sharding_kinds
from strategies.sparse24 import Sparse24
from strategies.sparse_embedding import SparseEmbedding
from strategies.topk import TopK

__all__ = ["CATALOG", "parse"]

CATALOG: dict[str, type[Strategy]] = {
    **sharding_kinds(),
    "fp32": Fp32,
    "bf16": Bf16,
    "lora": Lora,
    "dora": Dora,
    "qlora": Qlora,
    "head": Head,
    "difffit": DiffFit,
    "controlnet": ControlNet,
    "prune": Prune,
    "prune_structured": PruneStructured,
    "sparse24": Sparse24,
    "checkpoint": Checkpoint,
    "adamw": AdamW,
    "adam8bit": Adam8bit,
    "adam4bit": Adam4bit,
    "paged_adam8bit": PagedAdam8bit,
    "adafactor": Adafactor,
    "muon": Muon,
    "sgd": Sgd,
    "offload_adamw": OffloadAdamW,
    "onebit_adam": OneBitAdam,
    "optimizer_in_backward": OptimizerInBackward,
    "backward": Backward,
    "accumulate": Accumulate,
    "compress": Compress,
    "topk": TopK,
    "sparse_embedding": SparseEmbedding,
    "ema": Ema,
}


def parse(text: str, *, ema: bool = True) -> Recipe:
    """The recipe that ``text`` names; open places get fp32, adamw and (if ``ema``) the average.

    Raises:
        recipe.RecipeError: an unknown strategy or parameter, or a bad value.
        base.Conflict: two strategies for one place, or no sharding strategy.
    """
    average = Ema() if ema else Ema(place="none")
    return recipe.parse(text, CATALOG, defaults=(Fp32(), AdamW(), average))
