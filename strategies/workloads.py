"""Workloads (training, sampling), and the reasons why a technique of one makes no sense in the
other.

A strategy lists the workloads in which it has an effect (``Strategy.workloads``). In another it is
refused by its slot's reason or its own (``Strategy.idle``). No torch.
"""

from __future__ import annotations

from strategies.base import Slot

TRAIN, SAMPLE = "train", "sample"
WORKLOADS = {
    TRAIN: "optimizer steps over the data",
    SAMPLE: "samples drawn from noise, by the model as it is",
}
BOTH = (TRAIN, SAMPLE)

NOT_SAMPLING = {
    Slot.SHARD: (
        "samples are drawn by one process, or by replicas that share them by sp. There are "
        "no gradients and no optimizer state to shard or average; take single, or ddp+sp"
    ),
    Slot.PRECISION: "it is for training only; take bf16_pure, fp16_pure or bf16",
    Slot.CAST: "it stores frozen weights for a backward pass; take int8 or float8",
    Slot.TENSOR: (
        "ranks that draw samples together have whole weights each; leave it out, or take "
        "ddp+sp, which divides the samples' tokens"
    ),
    Slot.LOSS: "no loss is computed when samples are drawn; leave it out",
    Slot.ADAPT: (
        "it selects trained weights, but sampling trains none; merge lora's result into the "
        "weights, and give them by --weights"
    ),
    Slot.SPARSIFY: "it is for training only; leave it out, or give trained weights by --weights",
    Slot.RECOMPUTE: "without a backward pass nothing is kept that could be recomputed; leave it "
    "out",
    Slot.OFFLOAD: "without a backward pass no activations are kept; leave it out",
    Slot.OPTIMIZE: "there is no optimizer when samples are drawn; leave it out",
    Slot.STEP: "there is no backward pass and no step when samples are drawn; leave it out",
    Slot.ACCUMULATE: "there are no gradients to accumulate; a smaller --global-batch draws fewer "
    "samples at a time",
    Slot.COMPRESS: "no gradients are sent when samples are drawn; leave it out",
    Slot.AVERAGE: "weights do not move when samples are drawn; leave it out, and give averaged "
    "weights by --weights",
}
NOT_TRAINING = {
    Slot.PRECISION: (
        "it is for sampling only: small gradients vanish without a loss scale; take fp16, or "
        "--workload sample"
    ),
    Slot.STORE: "weights stored so take no gradient; take qlora, which trains adapters beside "
    "them, or --workload sample",
}
REASONS = {SAMPLE: NOT_SAMPLING, TRAIN: NOT_TRAINING}


def out_of_place(slot: Slot, workload: str) -> str:
    """Return why a strategy in ``slot`` makes no sense in ``workload``, then "; " and the
    remedy."""
    return REASONS[workload].get(slot, f"it has no effect in the workload {workload}; leave it out")
