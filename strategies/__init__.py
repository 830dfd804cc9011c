"""What a recipe is made of. CATALOG is the table of contents; nothing here imports harness."""

from __future__ import annotations

from strategies import recipe
from strategies.activations.attend import Attend
from strategies.activations.checkpoint import Checkpoint
from strategies.activations.compile import Compile
from strategies.activations.cuda_graphs import CudaGraphs
from strategies.activations.offload_activations import OffloadActivations
from strategies.adapters.cast import Cast
from strategies.adapters.controlnet import ControlNet
from strategies.adapters.lora import Dora, Lora, Qlora
from strategies.adapters.partial import DiffFit, Head
from strategies.communication.compress import Compress
from strategies.communication.sparse_embedding import SparseEmbedding
from strategies.communication.topk import TopK
from strategies.distillation.distill import Distill
from strategies.distillation.distilled import Distilled
from strategies.losses.cross_entropy import CrossEntropy
from strategies.optimizers.adamw import Adafactor, AdamW, AdamWBf16, Sgd
from strategies.optimizers.low_bit import Adam4bit, Adam8bit, PagedAdam8bit
from strategies.optimizers.muon import Muon
from strategies.optimizers.offload_adamw import OffloadAdamW
from strategies.optimizers.onebit_adam import OneBitAdam
from strategies.parallel.sequence.strategy import SequenceParallel
from strategies.parallel.tensor.strategy import TensorParallel
from strategies.precision.bfloat import Bf16Master, Bf16Pure
from strategies.precision.fp8 import Fp8
from strategies.precision.mixed import Bf16, Fp16, Fp16Pure, Fp32, Tf32
from strategies.recipe import Recipe
from strategies.sampling.adapter import Adapter
from strategies.sampling.guidance import Guidance
from strategies.sampling.palette import Palette
from strategies.sampling.quantised import Float8, Int8, Nf4
from strategies.sharding import sharding_kinds
from strategies.sparsity.prune import Prune, PruneStructured
from strategies.sparsity.sparse24 import Sparse24
from strategies.step.backward import Accumulate, Backward
from strategies.step.ema import Ema
from strategies.step.optimizer_in_backward import OptimizerInBackward
from strategies.strategy import Strategy
from strategies.streaming.block_swap import BlockSwap
from strategies.workloads import SAMPLE, TRAIN

__all__ = ["CATALOG", "parse"]

CATALOG: dict[str, type[Strategy]] = {
    **sharding_kinds(),
    "fp32": Fp32,
    "tf32": Tf32,
    "bf16": Bf16,
    "bf16_master": Bf16Master,
    "bf16_pure": Bf16Pure,
    "fp16": Fp16,
    "fp16_pure": Fp16Pure,
    "fp8": Fp8,
    "block_swap": BlockSwap,
    "cast": Cast,
    "lora": Lora,
    "dora": Dora,
    "qlora": Qlora,
    "head": Head,
    "difffit": DiffFit,
    "controlnet": ControlNet,
    "prune": Prune,
    "prune_structured": PruneStructured,
    "sparse24": Sparse24,
    "distilled": Distilled,
    "adapter": Adapter,
    "int8": Int8,
    "float8": Float8,
    "nf4": Nf4,
    "palette": Palette,
    "attend": Attend,
    "sp": SequenceParallel,
    "tp": TensorParallel,
    "checkpoint": Checkpoint,
    "offload_activations": OffloadActivations,
    "compile": Compile,
    "cuda_graphs": CudaGraphs,
    "cross_entropy": CrossEntropy,
    "distill": Distill,
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
    "guidance": Guidance,
}


def parse(text: str, *, ema: bool = True, workload: str = TRAIN) -> Recipe:
    """The recipe that ``text`` names; open places get fp32, adamw and (if ``ema``) the average, or
    where samples are drawn fp32 and guidance in one batch.

    Raises:
        recipe.RecipeError: an unknown strategy or parameter, or a bad value.
        base.Conflict: two strategies for one place, or no sharding strategy.
    """
    if workload == SAMPLE:
        return recipe.parse(text, CATALOG, defaults=(Fp32(), Guidance()))
    average = Ema() if ema else Ema(place="none")
    return recipe.parse(text, CATALOG, defaults=(Fp32(), AdamW(), average))
