"""Names that people type for a strategy: other spellings, and hints for names that have no single
meaning here.

Names are in lower case, with ``_`` for ``-``, ``.`` and ``=``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RUN = "./run.sh" if Path(__file__).resolve().parents[1].joinpath("run.sh").is_file() else "headroom"
"""The command, as messages name it: that of a clone, or of an installed package."""
STAGES = "stage{0} deepspeed_stage_{0} deepspeed_stage{0} deepspeed_zero{0}"
SPELLINGS = {
    "bf16": "bfloat16 bf16_mixed mixed_bf16",
    "fp16": "float16 half fp16_mixed mixed_fp16",
    "fp32": "float32",
    "bf16_pure": "pure_bf16",
    "fp16_pure": "pure_fp16",
    "checkpoint": "gradient_checkpointing gradient_checkpoint activation_checkpointing "
    "activation_checkpoint checkpointing recompute activation_recomputation",
    "adam8bit": "8bit_adam 8bit_adamw adamw8bit adamw_8bit adam_8bit bnb_adamw8bit",
    "adam4bit": "4bit_adam 4bit_adamw adamw4bit adamw_4bit adam_4bit",
    "paged_adam8bit": "paged_adamw8bit paged_adamw_8bit",
    "compile": "torch_compile compiled",
    "accumulate": "gradient_accumulation grad_accum grad_accumulation accumulation",
    "block_swap": "blockswap blocks_to_swap",
    "offload_activations": "activation_offload activation_offloading offload_activation",
    "ddp": "data_parallel distributed_data_parallel",
    "fsdp2": "fully_shard fsdp_2 fsdpv2",
    "tp": "tensor_parallel",
    "pp": "pipeline pipeline_parallel",
    "sp": "sequence_parallel",
    **{f"zero{stage}": STAGES.format(stage) for stage in (1, 2, 3)},
}
"""Strategy -> other names of the same meaning."""
SPELLED = {word: name for name, words in SPELLINGS.items() for word in words.split()}
"""Other name -> strategy of the same meaning."""

BLOCKS = "block_swap keeps some blocks in host memory, zero3_offload and fsdp2_offload all weights"
KERNEL = "torch's fused kernels are the default; attend:kernel=flash forces one"
HINTS = {
    "take fsdp2; FSDP of version 1 is not here": "fsdp fsdp1",
    "DeepSpeed's stages are zero1, zero2 and zero3, with offload zero2_offload and "
    "zero3_offload": "zero deepspeed ds",
    "take zero2_offload or zero3_offload": "zero_offload deepspeed_offload",
    f"{BLOCKS}, offload_adamw the optimizer's state, offload_activations what backward "
    "reads": "cpu_offload",
    BLOCKS: "group_offload model_offload sequential_offload",
    "take offload_adamw on one GPU, zero2_offload on several": (
        "adamw_offload cpu_adam cpuadam optimizer_offload offload_optimizer"
    ),
    "take checkpoint": "gc ac",
    "take bf16 or fp16": "amp autocast mixed_precision",
    "take bf16_pure, or bf16_pure:autocast=on if mixed precision stays on": "full_bf16",
    "take fp16_pure": "full_fp16",
    "take adamw": "adam",
    "take paged_adam8bit": "paged_adamw paged_adam",
    "take qlora to train adapters over 4-bit weights": "4bit int4 fp4",
    "take cast:to=int8 for frozen weights in 8 bits, adam8bit for the optimizer's state": "8bit",
    "the narrowest products are fp8; qlora stores frozen weights in 4 bits": "nvfp4",
    "take fp8:scaling=rowwise": "mxfp8",
    KERNEL: "flash_attention flash_attention_2 flash_attn flash_attn_3 flashattention "
    "flashattention2 fa2 fa3 sdpa xformers",
    f"it is not here; {KERNEL}": "sage_attention sageattention",
    "take sp (Ulysses), as sp:ranks=2": "ulysses ring ring_attention context_parallel cp",
    "take tp, sp and pp": "megatron",
    "take ddp": "dp",
    "take ema:place=none": "no_ema",
    "take optimizer_in_backward": "fused_backward fused_backward_pass gradient_release",
    "take bf16_pure+adamw_bf16, or adafactor:write=stochastic": "stochastic_rounding",
    "leave it out: every row clips alike": "gradient_clipping grad_clip",
    "a plan has it as --phases validate:tiled": "vae_tiling",
    "it is not here; optimizers with little state: adam8bit, adam4bit, adafactor, came, muon": (
        "lion galore apollo adam_mini schedulefree"
    ),
    "take lokr, loha or oft": "lycoris locon",
}
"""What to write instead -> the names that people type for it."""
MEANT = {word: hint for hint, words in HINTS.items() for word in words.split()}
"""Other name -> what to write instead."""

PLAIN = {"accumulate": "steps", "block_swap": "blocks", "lora": "rank", "checkpoint": "every"}
"""Strategy -> the parameter of a number that follows its name, as in ``grad_accum=4``."""
PARAMETERS = {"r": "rank", "dim": "rank", "network_dim": "rank", "lora_rank": "rank"}
"""Other name of a parameter -> its name, if the strategy has that one."""
CLOSE = 0.7
"""Least likeness of a word and a suggestion (``difflib``); below, they share only some letters."""


def plain(name: str) -> str:
    """Return a name in lower case, with ``_`` for ``-``, ``.`` and ``=``."""
    return re.sub(r"[-.=]", "_", name.lower())


def name_of(word: str, catalog: Mapping[str, Any]) -> str:
    """Return the strategy name in a recipe's word, in any spelling; an unknown name is returned as
    is."""
    name = word.partition(":")[0]
    small = plain(name)
    tried = (name, SPELLED.get(small, small), small.replace("_", ""))
    return next((one for one in tried if one in catalog), name)


def hint(word: str, catalog: Mapping[str, Any]) -> str:
    """Return what to write instead of an unknown strategy: its meaning here, or the closest name.

    A word as ``grad_accum=4`` is answered with the strategy and its parameter.
    """
    small = plain(word.partition(":")[0])
    if small in MEANT:
        return MEANT[small]
    name, _, number = re.sub(r"_steps(?=_)", "", small).rpartition("_")
    if number.isdigit() and (meant := name_of(name, catalog)) in PLAIN:
        return f"write {meant}:{PLAIN[meant]}={number}"
    close = difflib.get_close_matches(small, catalog, n=1, cutoff=CLOSE)
    return f"did you mean {close[0]!r}?" if close else f"{RUN} list shows what there is"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint with the known word closest to ``word``, else all of them."""
    known = sorted(known)
    small = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), small, n=1, cutoff=0.5)
    return f"did you mean {small[close[0]]!r}?" if close else f"known: {', '.join(known)}"
