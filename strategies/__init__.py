"""What a recipe is made of. CATALOG is the table of contents; nothing here imports harness."""

from __future__ import annotations

from strategies import recipe
from strategies.accumulate import Accumulate
from strategies.adamw_bf16 import AdamWBf16
from strategies.attend import Attend
from strategies.average import Ema
from strategies.backward import Backward
from strategies.base import Strategy
from strategies.bfloat import Bf16Master, Bf16Pure
from strategies.compiled import Compile
from strategies.float8 import Fp8
from strategies.fp16 import Fp16
from strategies.offload import OffloadActivations
from strategies.optimizers import AdamW
from strategies.precision import Bf16, Fp32, Tf32
from strategies.recipe import Recipe
from strategies.recompute import Checkpoint
from strategies.sharding import sharding_kinds

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
    "attend": Attend,
    "checkpoint": Checkpoint,
    "offload_activations": OffloadActivations,
    "compile": Compile,
    "adamw": AdamW,
    "adamw_bf16": AdamWBf16,
    "backward": Backward,
    "accumulate": Accumulate,
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
