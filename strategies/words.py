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
SPELLED = {
    "bfloat16": "bf16",
    "bf16_mixed": "bf16",
    "mixed_bf16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp16_mixed": "fp16",
    "mixed_fp16": "fp16",
    "float32": "fp32",
    "pure_bf16": "bf16_pure",
    "pure_fp16": "fp16_pure",
    **dict.fromkeys(
        (
            "gradient_checkpointing",
            "gradient_checkpoint",
            "activation_checkpointing",
            "activation_checkpoint",
            "checkpointing",
            "recompute",
            "activation_recomputation",
        ),
        "checkpoint",
    ),
    **dict.fromkeys(
        ("8bit_adam", "8bit_adamw", "adamw8bit", "adamw_8bit", "adam_8bit", "bnb_adamw8bit"),
        "adam8bit",
    ),
    **dict.fromkeys(
        ("4bit_adam", "4bit_adamw", "adamw4bit", "adamw_4bit", "adam_4bit"), "adam4bit"
    ),
    **dict.fromkeys(("paged_adamw8bit", "paged_adamw_8bit"), "paged_adam8bit"),
    **dict.fromkeys(("torch_compile", "compiled"), "compile"),
    **dict.fromkeys(
        ("gradient_accumulation", "grad_accum", "grad_accumulation", "accumulation"), "accumulate"
    ),
    **dict.fromkeys(("blockswap", "blocks_to_swap"), "block_swap"),
    **dict.fromkeys(
        ("activation_offload", "activation_offloading", "offload_activation"), "offload_activations"
    ),
    **dict.fromkeys(("data_parallel", "distributed_data_parallel"), "ddp"),
    **dict.fromkeys(("fully_shard", "fsdp_2", "fsdpv2"), "fsdp2"),
    "tensor_parallel": "tp",
    **dict.fromkeys(("pipeline", "pipeline_parallel"), "pp"),
    "sequence_parallel": "sp",
    **{
        f"{engine}{stage}": f"zero{stage}"
        for engine in ("stage", "deepspeed_stage_", "deepspeed_stage", "deepspeed_zero")
        for stage in (1, 2, 3)
    },
}
"""Other name -> strategy of the same meaning."""

ZERO = "DeepSpeed's stages are zero1, zero2 and zero3, with offload zero2_offload and zero3_offload"
BLOCKS = "block_swap keeps some blocks in host memory, zero3_offload and fsdp2_offload all weights"
KERNEL = "torch's fused kernels are the default; attend:kernel=flash forces one"
BACKWARD = "take optimizer_in_backward"
SEQUENCE = "take sp (Ulysses), as sp:ranks=2"
MIXED = "take bf16 or fp16"
CHECKPOINT = "take checkpoint"
MEANT = {
    **dict.fromkeys(("fsdp", "fsdp1"), "take fsdp2; FSDP of version 1 is not here"),
    **dict.fromkeys(("zero", "deepspeed", "ds"), ZERO),
    **dict.fromkeys(("zero_offload", "deepspeed_offload"), "take zero2_offload or zero3_offload"),
    "cpu_offload": f"{BLOCKS}, offload_adamw the optimizer's state, offload_activations what "
    "backward reads",
    **dict.fromkeys(("group_offload", "model_offload", "sequential_offload"), BLOCKS),
    **dict.fromkeys(
        ("adamw_offload", "cpu_adam", "cpuadam", "optimizer_offload", "offload_optimizer"),
        "take offload_adamw on one GPU, zero2_offload on several",
    ),
    **dict.fromkeys(("gc", "ac"), CHECKPOINT),
    **dict.fromkeys(("amp", "autocast", "mixed_precision"), MIXED),
    "full_bf16": "take bf16_pure, or bf16_pure:autocast=on if mixed precision stays on",
    "full_fp16": "take fp16_pure",
    "adam": "take adamw",
    **dict.fromkeys(("paged_adamw", "paged_adam"), "take paged_adam8bit"),
    **dict.fromkeys(("4bit", "int4"), "take qlora to train adapters over 4-bit weights"),
    "8bit": "take cast:to=int8 for frozen weights in 8 bits, adam8bit for the optimizer's state",
    "fp4": "take qlora to train adapters over 4-bit weights",
    "nvfp4": "the narrowest products are fp8; qlora stores frozen weights in 4 bits",
    "mxfp8": "take fp8:scaling=rowwise",
    **dict.fromkeys(
        (
            "flash_attention", "flash_attention_2", "flash_attn", "flash_attn_3", "flashattention",
            "flashattention2", "fa2", "fa3", "sdpa", "xformers",
        ),
        KERNEL,
    ),
    **dict.fromkeys(("sage_attention", "sageattention"), f"it is not here; {KERNEL}"),
    **dict.fromkeys(("ulysses", "ring", "ring_attention", "context_parallel", "cp"), SEQUENCE),
    "megatron": "take tp, sp and pp",
    "dp": "take ddp",
    "no_ema": "take ema:place=none",
    **dict.fromkeys(("fused_backward", "fused_backward_pass", "gradient_release"), BACKWARD),
    "stochastic_rounding": "take bf16_pure+adamw_bf16, or adafactor:write=stochastic",
    **dict.fromkeys(("gradient_clipping", "grad_clip"), "leave it out: every row clips alike"),
    "vae_tiling": "a plan has it as --phases validate:tiled",
    **dict.fromkeys(("lion", "galore", "apollo", "adam_mini", "schedulefree"),
                    "it is not here; optimizers with little state: adam8bit, adam4bit, adafactor, "
                    "came, muon"),
    **dict.fromkeys(("lycoris", "locon"), "take lokr, loha or oft"),
}  # fmt: skip
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
