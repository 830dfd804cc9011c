"""What a recipe is made of. CATALOG is the table of contents; nothing here imports harness."""

from __future__ import annotations

from strategies import recipe
from strategies.accumulate import Accumulate
from strategies.adafactor import Adafactor
from strategies.adamw import AdamW
from strategies.adamw_bf16 import AdamWBf16
from strategies.adapters import Dora, Lora, Qlora
from strategies.attend import Attend
from strategies.backward import Backward
from strategies.base import Strategy
from strategies.bfloat import Bf16Master, Bf16Pure
from strategies.checkpoint import Checkpoint
from strategies.compile import Compile
from strategies.compress import Compress
from strategies.controlnet import ControlNet
from strategies.ema import Ema
from strategies.fp8 import Fp8
from strategies.fp16 import Fp16
from strategies.low_bit import Adam4bit, Adam8bit, PagedAdam8bit
from strategies.muon import Muon
from strategies.offload_activations import OffloadActivations
from strategies.offload_adamw import OffloadAdamW
from strategies.onebit_adam import OneBitAdam
from strategies.optimizer_in_backward import OptimizerInBackward
from strategies.partial import DiffFit, Head
from strategies.precision import Bf16, Fp32, Tf32
from strategies.prune import Prune
from strategies.prune_structured import PruneStructured
from strategies.recipe import Recipe
from strategies.sgd import Sgd
from strategies.sharding import sharding_kinds
from strategies.sparse24 import Sparse24
from strategies.sparse_embedding import SparseEmbedding
from strategies.topk import TopK

__all__ = ["CATALOG", "parse"]

CATALOG: dict[str, type[Strategy]] = {
    **sharding_kinds(),
    "fp32": Fp32,
    "tf32": Tf32,
    "bf16": Bf16,
    "bf16_master": Bf16Master,
    "bf16_pure": Bf16Pure,
    "fp16": Fp16,
    "fp8": Fp8,
    "lora": Lora,
    "dora": Dora,
    "qlora": Qlora,
    "head": Head,
    "difffit": DiffFit,
    "controlnet": ControlNet,
    "prune": Prune,
    "prune_structured": PruneStructured,
    "sparse24": Sparse24,
    "attend": Attend,
    "checkpoint": Checkpoint,
    "offload_activations": OffloadActivations,
    "compile": Compile,
    "adamw": AdamW,
    "adamw_bf16": AdamWBf16,
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
