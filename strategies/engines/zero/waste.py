"""Memory that DeepSpeed settings waste.

Each rule names the setting, its bytes on each device, and the value that removes them. ``"auto"``
passes: it is resolved from the model. A setting that is absent counts as DeepSpeed's default
(0.19.8, runtime/zero/config.py), which is in force. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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

    @property
    def auto(self) -> dict[str, int]:
        """Sizes that "auto" resolves to."""
        return buffer_sizes(self.sizes)

    def bucket(self, zero: Mapping[str, Any]) -> tuple[int | None, int, int]:
        """Return the reduce bucket's size in elements (None: from the model), the size of "auto",
        and the number of buckets."""
        buckets = reduce_buckets(zero, self.device)
        right = buffer_sizes(self.sizes, buckets)["reduce_bucket_size"]
        return _number(zero, "reduce_bucket_size"), right, buckets


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
    findings = [finding for rule in RULES for finding in rule(zero, job) if finding.bytes > 0]
    return sorted(findings, key=lambda finding: -finding.bytes)


# ---- rules ----


def _number(zero: Mapping[str, Any], key: str) -> int | None:
    """Return the setting in force, in elements; None if it is resolved from the model."""
    value = zero.get(key, DEFAULTS[key])
    return None if value == "auto" else int(value)


def large_bucket(zero: Mapping[str, Any], job: Job) -> Iterator[Finding]:
    """Report a reduce bucket that is large for the model; it is allocated whole (issues 1302,
    3734)."""
    size, right, buckets = job.bucket(zero)
    if size is not None and size > MUCH * right and zero.get("contiguous_gradients", True):
        times = size / job.sizes.total
        share = f"{times:.1f} times" if times > 1 else f"{times:.0%} of"
        yield Finding(
            key="reduce_bucket_size",
            value=size,
            bytes=(size - right) * job.itemsize * buckets,
            why=f"the bucket is {share} the model, and is allocated whole"
            + (", twice for overlap_comm" if buckets == 2 else ""),
            fix=f'"reduce_bucket_size": "auto" ({right:,} here)',
        )


def kept_gathered(zero: Mapping[str, Any], job: Job) -> Iterator[Finding]:
    """Report a reuse distance that keeps parameters gathered.

    ZeRO-3 releases a parameter only if its next use is beyond that distance. Forward and backward
    of the first block are two whole models apart, so half of the distance stays gathered; a rank's
    own share exists anyway.
    """
    reuse = _number(zero, "stage3_max_reuse_distance")
    if int(zero.get("stage", 0)) != 3 or reuse is None or reuse < job.sizes.total:
        return
    gathered = min(job.sizes.total, reuse // 2) - 2 * job.sizes.block
    yield Finding(
        key="stage3_max_reuse_distance",
        at_most=True,
        value=reuse,
        bytes=max(0, gathered) * job.itemsize * (job.ranks - 1) // job.ranks,
        why="gathered parameters are kept for a use that far ahead, so ZeRO-3 saves few or none",
        fix=f'"stage3_max_reuse_distance": "auto" ({2 * job.sizes.block:,} here)',
    )


def everything_live(zero: Mapping[str, Any], job: Job) -> Iterator[Finding]:
    """Report a bound on live parameters at or above the model's size: ZeRO-3 then keeps all
    gathered."""
    live = _number(zero, "stage3_max_live_parameters")
    if int(zero.get("stage", 0)) != 3 or live is None or live < job.sizes.total:
        return
    yield Finding(
        key="stage3_max_live_parameters",
        at_most=True,
        value=live,
        bytes=(job.sizes.total - 2 * job.sizes.block) * job.itemsize * (job.ranks - 1) // job.ranks,
        why=f"all {job.sizes.total:,} parameters stay gathered, so ZeRO-3 saves none of them",
        fix=f'"stage3_max_live_parameters": "auto" ({2 * job.sizes.block:,} here)',
    )


def wide_prefetch(zero: Mapping[str, Any], job: Job) -> Iterator[Finding]:
    """Report prefetching of more than the two blocks that may be live."""
    ahead = _number(zero, "stage3_prefetch_bucket_size")
    if int(zero.get("stage", 0)) != 3 or ahead is None or ahead <= 2 * job.sizes.block:
        return
    extra = min(ahead, job.sizes.total) - job.sizes.block // 2
    yield Finding(
        key="stage3_prefetch_bucket_size",
        at_most=True,
        value=ahead,
        bytes=extra * job.itemsize * (job.ranks - 1) // job.ranks,
        why="more than two blocks are fetched ahead",
        fix=f'"stage3_prefetch_bucket_size": "auto" ({job.sizes.block // 2:,} here)',
    )


def unsharded_weights(zero: Mapping[str, Any], job: Job) -> Iterator[Finding]:
    """Report weights below the persistence threshold, which stay whole on every rank; it is for
    biases."""
    limit = _number(zero, "stage3_param_persistence_threshold")
    if int(zero.get("stage", 0)) != 3 or limit is None:
        return
    whole = [size for size in job.sizes.weights if size <= limit]
    yield Finding(
        key="stage3_param_persistence_threshold",
        value=limit,
        bytes=sum(whole) * job.itemsize * (job.ranks - 1) // job.ranks,
        why=f"{len(whole)} weights are not sharded",
        fix=f'"stage3_param_persistence_threshold": "auto" ({job.sizes.bias:,} here)',
    )


def whole_shard_swapped(zero: Mapping[str, Any], job: Job) -> Iterator[Finding]:
    """Report a sub-group larger than the model: an optimizer on NVMe then reads all of itself at
    once."""
    size = _number(zero, "sub_group_size")
    place = (zero.get("offload_optimizer") or {}).get("device", "none")
    if int(zero.get("stage", 0)) != 3 or place != "nvme" or size is None or size < job.sizes.total:
        return
    right = job.auto["sub_group_size"]
    yield Finding(
        key="sub_group_size",
        value=size,
        bytes=(job.sizes.total - right) * NVME_STATE_BYTES // job.ranks,
        why="the whole shard of the optimizer is read into host memory at once",
        fix=f'"sub_group_size": "auto" ({right:,} here)',
    )


Rule = Callable[[Mapping[str, Any], Job], Iterator[Finding]]
RULES: tuple[Rule, ...] = (
    large_bucket,
    kept_gathered,
    everything_live,
    wide_prefetch,
    unsharded_weights,
    whole_shard_swapped,
)
