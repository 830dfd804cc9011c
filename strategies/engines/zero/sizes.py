"""The sizes of DeepSpeed's buffers, settled from the model: its defaults exceed a whole DiT-XL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strategies.sizes import Sizes

__all__ = ["buffer_sizes", "overlaps", "piece_size", "reduce_buckets", "swap_block_bytes"]

PIECES = 16
"""Into how many a rank's optimizer is cut where a share of it is offloaded."""


def overlaps(zero: Mapping[str, Any], device: str) -> bool:
    """Whether communication runs beside the computation, by a zero_optimization block on a
    ``device`` (cpu or cuda). "auto" is true on GPUs, as DDP's does and as users of ZeRO run it; a
    CPU has no streams to overlap on. Where the key is absent DeepSpeed overlaps in stage 3 alone.
    """
    asked = zero.get("overlap_comm")
    if asked is None:
        return zero.get("stage") == 3
    return device != "cpu" if asked == "auto" else bool(asked)


def reduce_buckets(zero: Mapping[str, Any], device: str) -> int:
    """Buckets that gradients are reduced in: stages 1 and 2 fill one while the other is on its way
    where they overlap (DeepSpeed 0.19.8, stage_1_and_2.py, setup_buckets)."""
    return 2 if zero.get("stage") in (1, 2) and overlaps(zero, device) else 1


def buffer_sizes(model: Sizes, buckets: int = 1) -> dict[str, int]:
    """DeepSpeed's buffer sizes, in elements, where gradients are reduced in so many ``buckets``:
    two of them are half as large each, so that overlapping costs no more memory than not.

    With its defaults (5e8 elements a bucket, 1e9 live parameters) the buckets outweigh what ZeRO-2
    saves (DeepSpeed issues 1302, 3734, 5305), and ZeRO-3 keeps every parameter gathered.
    """
    total, block, tensor, bias = model[:4]
    share = min(total // 16, 50_000_000)
    # Stages 1 and 2 assert an even allgather bucket.
    reduced, gathered = (_even(max(tensor, size)) for size in (share // buckets, share))
    return {
        "reduce_bucket_size": reduced,
        "allgather_bucket_size": gathered,
        # ZeRO-3 fetches the next half block while it computes, and lets go of all but two blocks.
        "stage3_prefetch_bucket_size": max(block // 2, 1),
        "stage3_max_live_parameters": 2 * block,
        "stage3_max_reuse_distance": 2 * block,
        # Biases stay gathered: a collective each would cost more than their bytes.
        "stage3_param_persistence_threshold": bias,
        # The optimizer walks a rank's shard in pieces; offloading holds one piece at a time.
        # DeepSpeed leaves pieces below 1 MiB a rank in host memory instead of swapping them.
        # A model that stands for a deeper one is walked in as many.
        "sub_group_size": max((model.here or total) // 8, tensor, 2**20),
    }


def piece_size(model: Sizes, processes: int) -> int:
    """Elements of a rank's optimizer that are dealt to host or device together, where some of it is
    offloaded: small enough for the share that was asked for."""
    return max(1, (model.here or model.total) // (PIECES * processes))


def _even(size: int) -> int:
    return size + size % 2


def swap_block_bytes(tensor: int, processes: int) -> int:
    """The NVMe block size, in bytes: above a rank's share of the largest gradient, float32.

    DeepSpeed swaps gradients from one block on, and reads them back to wherever they lie in the
    shard. Direct I/O wants addresses that are multiples of 512 bytes; a DiT's biases shift the
    gradients off them, the read fails unseen, and the step uses stale gradients (the loss is then
    1 % off after ten steps; see also DeepSpeed issue 2272). Below one block they stay in the host
    buffer that they are in anyway. Whole shards are aligned, and are still swapped.
    """
    share = 4 * -(-tensor // processes)
    return max(2**20, 1 << share.bit_length())
