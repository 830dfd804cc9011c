"""Techniques that people ask for and that are no strategy here, each with the reason. No torch."""

from __future__ import annotations

__all__ = ["ABSENT", "absent"]

CACHE = "a DiT has no cache of keys and values, for all its tokens change in each evaluation"
KERNELS = "DeepSpeed quantises by CUDA kernels, which no GPU has been there to prove here"
ABSENT = {
    "flash_decoding": "it splits a long cache over a GPU while one token is decoded, and "
    f"{CACHE}; take attend:kernel=flash",
    "kv_cache": f"{CACHE}; take attend:kernel=flash",
    "paged_attention": f"it keeps a cache in pages, and {CACHE}; take attend:kernel=flash",
    "speculative_decoding": "it guesses tokens that are decoded one after the other, and a sampler "
    "changes all of them together; take fewer --sampler-steps, or a student (distill, distilled)",
    "mics": "DeepSpeed has removed it (0.19 refuses mics_shard_size): groups of ranks that shard "
    "among themselves, and average over the groups; take hsdp, or zero3_hpz to gather so",
    "qwz": f"{KERNELS}, which take float16 and a number of weights that their blocks divide; take "
    "zero3_hpz, which keeps gathers within a node, or zero3+bf16, which halves their bytes",
    "qgz": f"{KERNELS}, for gradients in 4 bits; take zero2+bf16, or ddp+compress:kind=powersgd",
    "superoffload": "it steps DeepSpeed's CPU Adam in a process of its own, whose moments neither "
    "evidence nor a checkpoint reaches, before the norm is known that clips, and on NVIDIA GPUs "
    "alone; take zero3_offload_partial, or zero3_offload",
    "zenflow": "it makes its own interval the accumulation of gradients, and steps most columns "
    "with old ones, so that no step of it is the step that other rows take; its optimizer is of "
    "DeepSpeed's JSON alone; take zero3_offload_partial, or zero2_offload",
}
"""Name -> why it is not here, then "; " and what there is instead."""

ALIASES = {
    **dict.fromkeys(("zero_plus_plus", "zeropp", "quantized_weights"), "qwz"),
    **dict.fromkeys(("zero3_qwz", "zero_quantized_weights"), "qwz"),
    **dict.fromkeys(("zero3_qgz", "zero_quantized_gradients", "quantized_gradients"), "qgz"),
    **dict.fromkeys(("super_offload", "zero3_superoffload", "zero3_super_offload"), "superoffload"),
    **dict.fromkeys(("zen_flow", "zero2_zenflow", "zero3_zenflow"), "zenflow"),
    "zero3_mics": "mics",
}
"""Other spellings of the same."""


def absent(name: str) -> str | None:
    """Why there is no strategy of this name, however it is spelled; None: it is not known."""
    plain = name.lower().replace("-", "_")
    return ABSENT.get(ALIASES.get(plain, plain))
