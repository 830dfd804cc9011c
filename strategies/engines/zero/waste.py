"""Memory that DeepSpeed settings waste.

Each finding names the setting, its bytes on each device, and the value that removes them.
``"auto"`` passes: it is resolved from the model. A setting that is absent counts as DeepSpeed's
default (0.19.8, runtime/zero/config.py), which is in force. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strategies.base import Sizes
from strategies.engines.zero.config import buffer_sizes, reduce_buckets

DEFAULTS: dict[str, Any] = {
    "reduce_bucket_size": 500_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "sub_group_size": 1_000_000_000,
}
MUCH = 4
"""Ratio to the size of "auto" from which a bucket is reported."""
NVME_STATE_BYTES = 16
"""Bytes of a swapped element in memory: float32 master, gradient and two moments."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Model and launch that determine the bytes; ``itemsize`` is bytes of a stored weight.

    ``device`` is cpu or cuda; a lint uses the GPU.
    """

    sizes: Sizes
    itemsize: int
    ranks: int
    device: str = "cuda"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Setting that costs ``bytes`` on a device, with the reason ``why``.

    ``at_most``: the number held at once depends on the order in which modules are used.
    """

    key: str
    value: Any
    bytes: int
    why: str
    fix: str
    at_most: bool = False

    def __str__(self) -> str:
        cost = f"{'up to ' if self.at_most else ''}{self.bytes / 2**20:,.1f} MiB a device"
        return f"{self.key} is {self.value}: {self.why}, {cost}; set {self.fix}"


def waste(zero: Mapping[str, Any], job: Job) -> list[Finding]:
    """Return what ``zero`` (a zero_optimization block) wastes for ``job``, the most costly
    first."""
    asked = {**DEFAULTS, **zero}
    known = {key: 0 if asked[key] == "auto" else int(asked[key]) for key in DEFAULTS}
    total, block, buckets = job.sizes.total, job.sizes.block, reduce_buckets(zero, job.device)
    auto, found = buffer_sizes(job.sizes, buckets), list[Finding]()

    def add(key: str, size: int, why: str, at_most: bool = False) -> None:
        fix = f'"{key}": "auto" ({auto[key]:,} here)'
        if size > 0:
            found.append(
                Finding(key=key, value=known[key], bytes=size, why=why, fix=fix, at_most=at_most)
            )

    def gathered(elements: int) -> int:  # a rank's own share of a weight exists anyway
        return elements * job.itemsize * (job.ranks - 1) // job.ranks

    bucket, right = known["reduce_bucket_size"], auto["reduce_bucket_size"]
    if bucket > MUCH * right and zero.get("contiguous_gradients", True):  # issues 1302, 3734
        share = f"{bucket / total:.1f} times" if bucket > total else f"{bucket / total:.0%} of"
        why = f"the bucket is {share} the model, and is allocated whole"
        twice = ", twice for overlap_comm" if buckets == 2 else ""
        add("reduce_bucket_size", (bucket - right) * job.itemsize * buckets, why + twice)
    if int(zero.get("stage", 0)) == 3:
        # ZeRO-3 releases a parameter only if its next use is beyond the reuse distance. Forward and
        # backward of the first block are two whole models apart: half of it stays gathered.
        if (reuse := known["stage3_max_reuse_distance"]) >= total:
            why = "gathered parameters are kept for a use that far ahead, so ZeRO-3 saves few or "
            kept = min(total, reuse // 2) - 2 * block
            add("stage3_max_reuse_distance", gathered(kept), f"{why}none", True)
        if known["stage3_max_live_parameters"] >= total:
            why = f"all {total:,} parameters stay gathered, so ZeRO-3 saves none of them"
            add("stage3_max_live_parameters", gathered(total - 2 * block), why, True)
        if (ahead := known["stage3_prefetch_bucket_size"]) > 2 * block:
            size = gathered(min(ahead, total) - block // 2)
            why = "more than two blocks are fetched ahead"
            add("stage3_prefetch_bucket_size", size, why, True)
        limit = known["stage3_param_persistence_threshold"]  # it is for biases
        whole = [size for size in job.sizes.weights if size <= limit]
        why = f"{len(whole)} weights are not sharded"
        add("stage3_param_persistence_threshold", gathered(sum(whole)), why)
        place = (zero.get("offload_optimizer") or {}).get("device", "none")
        if known["sub_group_size"] >= total and place == "nvme":
            size = (total - buffer_sizes(job.sizes)["sub_group_size"]) * NVME_STATE_BYTES
            why = "the whole shard of the optimizer is read into host memory at once"
            add("sub_group_size", size // job.ranks, why)
    return sorted(found, key=lambda finding: -finding.bytes)
