"""The mission's rows by name: each is a recipe, or a test of a command, that must stay."""

from __future__ import annotations

TRAINED = {
    "checkpointing, every block": "single+checkpoint",
    "checkpointing, every k": "single+checkpoint:every=2",
    "checkpointing, sqrt": "single+checkpoint:every=sqrt",
    "checkpointing, share": "single+checkpoint:share=0.5",
    "checkpointing, every second block": "single+checkpoint:share=0.5,spread=on",
    "checkpointing, nothing": "single+checkpoint:keep=nothing",
    "checkpointing, products": "single+checkpoint:every=2,keep=products",
    "accumulation": "single+accumulate",
    "bf16": "single+bf16",
    "bf16, pure": "single+bf16_pure",
    "pruning by masks": "single+prune",
    "pruning, structured": "single+prune_structured",
    "autograd.grad": "single+backward:call=autograd_grad",
    "sparse gradients": "single+sgd:momentum=0.0+sparse_embedding",
    "cpu offload of activations": "single+offload_activations",
    "lora": "single+lora",
    "dora": "single+dora",
    "qlora, nf4": "single+qlora",
    "controlnet": "single+controlnet",
    "head": "single+head",
    "difffit": "single+difffit",
    "attention kernel, naive": "single+attend:kernel=naive",
    "attention kernel, math": "single+attend:kernel=math",
    "attention kernel, flash": "single+attend:kernel=flash",
    "int8 frozen weights": "single+cast+lora",
    "fp8": "single+fp8:emulate=on",
    "distillation, output loss": "single+distill",
    "distillation, feature loss": "single+distill:depth=3,feature=1.0",
    "cut cross-entropy, its reference in chunks": "single+cross_entropy",
}
"""Recipes of one process, trained with the evidence of all parts."""
STOOD_IN = {
    "fp16": "single+fp16",
    "2:4 sparsity": "single+bf16+sparse24",
    "paged optimizer": "single+paged_adam8bit",
    "cpu offload of the optimizer, one GPU": "single+offload_adamw",
}
"""The same of what a CPU lacks: tests.made.stand_ins replaces it, test_stubs trains it."""
DRAWN = {
    "quantised sampling, int8": "single+int8",
    "quantised sampling, nf4": "single+nf4",
    "quantised sampling, float8": "single+float8",
    "palette": "single+palette",
}
"""Recipes that draw samples, with the evidence of all parts."""
LAUNCHED = {
    "zero 1": "zero1",
    "zero 2": "zero2",
    "zero 3": "zero3",
    "fsdp2": "fsdp2",
    "hsdp": "hsdp",
    "cpu offload of the optimizer": "zero2_offload",
    "cpu offload of parameters": "zero3_offload",
    "nvme": "zero3_nvme",
    "naive model parallelism": "model_parallel",
    "pipeline": "pp",
    "master weights": "zero2+bf16_master",
    "compression": "ddp+compress:kind=powersgd",
    "top-k": "ddp+topk+accumulate",
}
"""Recipes of several processes, which worker/test_runs or strategies/test_launched launches."""
TESTS = {
    "tensor parallelism": "strategies/test_tensor.py",
    "max-batch": "commands/test_max_batch.py",
    "resume": "worker/test_resume.py",
    "profiler, snapshots": "worker/test_profile.py",
    "activation formula, memory breakdown": "memory/test_anatomy.py",
    "roofline": "predict/test_cards.py",
}
"""Files of tests that run the rest."""

FITTING = {
    "paged_adam8bit": {"model": "DiT-S/8:depth=2"},  # smaller moments are no page
    "cross_entropy": {"model": "DiT-T/8:tokens=512", "objective": "masked", "data": "synthetic"},
    # A CPU takes 0.1 s for a float8 product of a larger batch.
    "fp8": {"global_batch": 1},
}
"""What of the spec differs for a strategy."""
