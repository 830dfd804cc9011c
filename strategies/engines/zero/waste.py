"""Memory that DeepSpeed settings waste.

Each finding names the setting, its bytes on each device, and the value that removes them.
``"auto"`` passes: it is resolved from the model. A setting that is absent counts as DeepSpeed's
default (0.19.8, runtime/zero/config.py), which is in force. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    known = {key: None if asked[key] == "auto" else int(asked[key]) for key in DEFAULTS}
    buckets = reduce_buckets(zero, job.device)
    auto = buffer_sizes(job.sizes, buckets)
    found = [_bucket(known["reduce_bucket_size"], zero, job, buckets)]
    if int(zero.get("stage", 0)) == 3:
        found += _sharded(known, zero, job)
    findings = [
        Finding(
            key=key, value=known[key], bytes=size, why=why, at_most=at_most,
            fix=f'"{key}": "auto" ({auto[key]:,} here)',
        )
        for key, size, why, at_most in found
        if size > 0
    ]  # fmt: skip
    return sorted(findings, key=lambda finding: -finding.bytes)


Cost = tuple[str, int, str, bool]
"""Key, bytes, reason and ``at_most`` of a finding; 0 bytes: none."""


def _bucket(size: int | None, zero: Mapping[str, Any], job: Job, buckets: int) -> Cost:
    """Return the cost of a large reduce bucket, which is allocated whole (issues 1302, 3734)."""
    right = buffer_sizes(job.sizes, buckets)["reduce_bucket_size"]
    large = size is not None and size > MUCH * right and zero.get("contiguous_gradients", True)
    cost = (size - right) * job.itemsize * buckets if size is not None and large else 0
    times = (size or 0) / job.sizes.total
    share = f"{times:.1f} times" if times > 1 else f"{times:.0%} of"
    twice = ", twice for overlap_comm" if buckets == 2 else ""
    return (
        "reduce_bucket_size", cost,
        f"the bucket is {share} the model, and is allocated whole{twice}", False,
    )  # fmt: skip


def _sharded(known: Mapping[str, int | None], zero: Mapping[str, Any], job: Job) -> Iterator[Cost]:
    """Yield the costs of stage 3's settings; a rank's own share of a weight exists anyway."""
    total, block = job.sizes.total, job.sizes.block

    def gathered(elements: int) -> int:
        return elements * job.itemsize * (job.ranks - 1) // job.ranks

    # ZeRO-3 releases a parameter only if its next use is beyond the reuse distance. Forward and
    # backward of the first block are two whole models apart: half of the distance stays gathered.
    key = "stage3_max_reuse_distance"
    if (reuse := known[key]) is not None and reuse >= total:
        why = "gathered parameters are kept for a use that far ahead, so ZeRO-3 saves few or none"
        yield key, gathered(min(total, reuse // 2) - 2 * block), why, True
    key = "stage3_max_live_parameters"
    if (live := known[key]) is not None and live >= total:
        why = f"all {total:,} parameters stay gathered, so ZeRO-3 saves none of them"
        yield key, gathered(total - 2 * block), why, True
    key = "stage3_prefetch_bucket_size"
    if (ahead := known[key]) is not None and ahead > 2 * block:
        why = "more than two blocks are fetched ahead"
        yield key, gathered(min(ahead, total) - block // 2), why, True
    key = "stage3_param_persistence_threshold"
    if (limit := known[key]) is not None:  # it is for biases
        whole = [size for size in job.sizes.weights if size <= limit]
        yield key, gathered(sum(whole)), f"{len(whole)} weights are not sharded", False
    key = "sub_group_size"
    place = (zero.get("offload_optimizer") or {}).get("device", "none")
    if (size := known[key]) is not None and size >= total and place == "nvme":
        why = "the whole shard of the optimizer is read into host memory at once"
        right = buffer_sizes(job.sizes)[key]
        yield key, (total - right) * NVME_STATE_BYTES // job.ranks, why, False
