"""DeepSpeed settings: buffer sizes, values of a run, and refused settings. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from strategies.base import Sizes
from strategies.recipe import ABSENT
from strategies.users_launch import FORCE, OFFLOADS

if TYPE_CHECKING:
    from strategies.engine import Workload


NOT_HERE = {
    ("zero_optimization", "mics_shard_size"): "mics",
    ("zero_optimization", "zero_quantized_nontrainable_weights"): "quantized_nontrainable_weights",
    ("zero_optimization", "zero_quantized_gradients"): "qgz",
    ("zero_optimization", "zero_quantized_weights"): "zero3_qwz",
    ("zero_optimization", "zenflow"): "zenflow",
    ("activation_checkpointing", "cpu_checkpointing"): "cpu_checkpointing",
    ("activation_checkpointing", "partition_activations"): "cpu_checkpointing",
    ("compile", "deepcompile"): "deepcompile",
}
"""Block and key of the JSON -> name of the unsupported technique in ``ABSENT``."""


def fault(config: Mapping[str, Any]) -> str | None:
    """Return why no run can start with this DeepSpeed config, and the remedy; None if it can."""
    zero = config["zero_optimization"]
    offload = zero.get(OFFLOADS[0]) or {}
    asked = {name for (block, key), name in NOT_HERE.items() if (config.get(block) or {}).get(key)}
    asked |= {"superoffload"} if offload.get("super_offload") else set()
    asked |= {"zero3_offload_partial"} if float(offload.get("ratio", 1.0)) < 1 else set()
    for name in sorted(asked):
        return f"there is no {name}: {ABSENT[name]}"
    if offload.get("device", "none") != "none" and config.get(FORCE, True):
        return (
            "accelerate would make the CPU Adam anew, without decoupled weight decay and betas: "
            f'write "{FORCE}": false'
        )
    return None


# ---- buffer sizes ----


def overlaps(zero: Mapping[str, Any], device: str) -> bool:
    """Return whether communication overlaps with computation on ``device`` (cpu or cuda), by a
    zero_optimization block.

    "auto" is true on GPUs, as in DDP; a CPU has no streams. Without the key only stage 3 overlaps.
    """
    asked = zero.get("overlap_comm")
    if asked is None:
        return zero.get("stage") == 3
    return device != "cpu" if asked == "auto" else bool(asked)


def reduce_buckets(zero: Mapping[str, Any], device: str) -> int:
    """Return the number of buckets for gradient reduction: stages 1 and 2 fill one while the other
    is sent, if they overlap (DeepSpeed 0.19.8, stage_1_and_2.py, setup_buckets)."""
    return 2 if zero.get("stage") in (1, 2) and overlaps(zero, device) else 1


def buffer_sizes(model: Sizes, buckets: int = 1) -> dict[str, int]:
    """Return DeepSpeed's buffer sizes, in elements, for gradients reduced in ``buckets`` buckets.

    Two buckets are half as large each, so overlapping costs no extra memory. With DeepSpeed's
    defaults (5e8 elements a bucket, 1e9 live parameters) the buckets outweigh what ZeRO-2 saves
    (DeepSpeed issues 1302, 3734, 5305), and ZeRO-3 keeps every parameter gathered.
    """
    total, block, tensor, bias = model[:4]
    share = min(total // 16, 50_000_000)
    # Stages 1 and 2 assert an even allgather bucket.
    reduced, gathered = (max(tensor, size) for size in (share // buckets, share))
    return {
        "reduce_bucket_size": reduced + reduced % 2,
        "allgather_bucket_size": gathered + gathered % 2,
        # ZeRO-3 prefetches half a block while it computes, and releases all but two blocks.
        "stage3_prefetch_bucket_size": max(block // 2, 1),
        "stage3_max_live_parameters": 2 * block,
        "stage3_max_reuse_distance": 2 * block,
        # Biases stay gathered: a collective for each would cost more than their bytes.
        "stage3_param_persistence_threshold": bias,
        # The optimizer steps a rank's shard in pieces; offloading holds one piece at a time.
        # DeepSpeed keeps pieces below 1 MiB per rank in host memory instead of swapping them.
        # A shallow model that represents a deeper one has as many pieces.
        "sub_group_size": max((model.here or total) // 8, tensor, 2**20),
    }


def swap_block_bytes(tensor: int, processes: int) -> int:
    """Return the NVMe block size in bytes: above a rank's share of the largest gradient in float32.

    DeepSpeed swaps gradients of a block or more, and reads them back to their offset in the shard.
    Direct I/O needs addresses that are multiples of 512 bytes: a DiT's biases shift the gradients
    off them, the read fails without an error, and the step uses stale gradients (see also DeepSpeed
    issue 2272). Gradients below one block stay in their host buffer; whole shards are aligned.
    """
    share = 4 * -(-tensor // processes)
    return max(2**20, 1 << share.bit_length())


# ---- resolved JSON ----
# The planner exports a config by the same functions.


def settle(config: dict[str, Any], work: Workload, processes: int, device: str) -> None:
    """Write the spec's, the model's and the ``device``'s values into a DeepSpeed config, which has
    "auto" or an explicit 0.0 for them; otherwise accelerate would clip at 1.0."""
    config["train_micro_batch_size_per_gpu"] = work.micro_batch
    config["gradient_clipping"] = work.clip
    for _, block in nvme_blocks(config):
        block["nvme_path"] = str(work.scratch)
    zero = config["zero_optimization"]
    sizes = buffer_sizes(work.sizes, reduce_buckets(zero, device))
    fill(zero, {**sizes, "overlap_comm": overlaps(zero, device)})
    fill(config.get("aio", {}), {"block_size": swap_block_bytes(work.sizes.tensor, processes)})


def fill(block: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Replace the values "auto" of ``block`` by these."""
    block.update({key: value for key, value in values.items() if block.get(key) == "auto"})


def nvme_blocks(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the offload blocks of a config that swap to files, by name."""
    blocks = [(name, config["zero_optimization"].get(name) or {}) for name in OFFLOADS]
    return [(name, block) for name, block in blocks if block.get("device") == "nvme"]


def sixteen_bits(config: dict[str, Any], *, master: bool, scale: int) -> None:
    """Write the format of 16-bit weights (``Engine.sixteen_bits``)."""
    if not master:
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if scale:
        power = scale.bit_length() - 1
        config["fp16"] |= {"loss_scale": 0, "initial_scale_power": power}
