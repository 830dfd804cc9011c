"""Techniques that people ask for and that are no strategy here, each with the reason. No torch."""

from __future__ import annotations

__all__ = ["ABSENT", "absent"]

CACHE = "a DiT has no cache of keys and values, for all its tokens change in each evaluation"
ABSENT = {
    "flash_decoding": "it splits a long cache over a GPU while one token is decoded, and "
    f"{CACHE}; take attend:kernel=flash",
    "kv_cache": f"{CACHE}; take attend:kernel=flash",
    "paged_attention": f"it keeps a cache in pages, and {CACHE}; take attend:kernel=flash",
    "speculative_decoding": "it guesses tokens that are decoded one after the other, and a sampler "
    "changes all of them together; take fewer --sampler-steps, or a student (distill, distilled)",
    "mics": "DeepSpeed has removed it (0.19 refuses mics_shard_size): groups of ranks that shard "
    "among themselves, and average over the groups; take hsdp, or zero3_hpz to gather so",
    "quantized_nontrainable_weights": "DeepSpeed quantises frozen weights by the CUDA kernels of "
    "zero3_qwz, and keeps them so; take cast, qlora, or zero3_qwz, which rounds what travels alone",
    "qgz": "its kernel reads every gradient as float16, bfloat16's bits too (DeepSpeed 0.19, "
    "all_to_all_quant_reduce), takes all GPUs of a machine for its group, and sends as they are "
    "those that do not divide; take zero2+bf16, or ddp+compress:kind=powersgd",
    "superoffload": "it steps DeepSpeed's CPU Adam in a process of its own, whose moments neither "
    "evidence nor a checkpoint reaches, before the norm is known that clips, and on NVIDIA GPUs "
    "alone; take zero3_offload_partial, or zero3_offload",
    "zenflow": "it makes its own interval the accumulation of gradients, and steps most columns "
    "with old ones, so that no step of it is the step that other rows take; its optimizer is of "
    "DeepSpeed's JSON alone; take zero3_offload_partial, or zero2_offload",
}
"""Name -> why it is not here, then "; " and what there is instead."""

ALIASES = {
    "zero_quantized_nontrainable_weights": "quantized_nontrainable_weights",
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
