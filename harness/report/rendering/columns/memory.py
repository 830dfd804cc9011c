"""The columns of the tables of memory: by phase, by what it is for, all counts; and of buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.report.data.grid import Column
from harness.report.data.rows import Row
from harness.report.figures import derive, units
from harness.report.figures.categories import CATEGORIES, title
from harness.report.rendering.columns.values import HOSTED, NEED, PEAK, RECIPE, RESIDENT, number
from harness.result import Categories

__all__ = ["BUCKETS", "HOST_SPLIT", "MEMORY", "PHASES", "SPLIT", "fullest_host", "zero_block"]

BUCKET_NAMES = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_param_persistence_threshold",
    "sub_group_size",
)


# ---- values ----


def _host(category: str) -> Callable[[Row], Any]:
    """A category of what the host held."""
    return lambda row: getattr(fullest_host(row), category, None)


def fullest_host(row: Row) -> Categories | None:
    """What the fullest rank held in host memory at its traced peak: on a GPU by the tensors'
    devices, without one by the engine's placement; None where it held nothing there."""
    ranks = [rank for result in row.results for rank in result.ranks]
    placed = [rank.categories and rank.categories.host for rank in ranks]
    traced = [c for c in (*placed, *(rank.host_categories for rank in ranks)) if c]
    return max(traced, key=lambda categories: categories.total, default=None)


def _peak_phase(row: Row) -> str | None:
    return (row.numbers.peak_phase or "").replace("_", " ") or None


def traced_peak(row: Row) -> int | None:
    """Bytes of all categories together; without a GPU that is the peak."""
    sizes = [getattr(row.numbers, f"{name}_bytes") for name in CATEGORIES]
    return None if None in sizes else sum(sizes)


# ---- tables ----

PHASES = (
    RECIPE,
    *(
        Column(f"{title(phase)} GiB", number(f"{phase}_metered_bytes"), "gib")
        for phase in derive.PHASES
    ),
    Column("Peak in", lambda r: _peak_phase(r) if r.first.meter == "cuda" else None),
)
MEMORY = (
    RECIPE,
    PEAK,
    NEED,
    HOSTED,
    RESIDENT,
    Column("Active GiB", number("active_peak_bytes"), "gib"),
    Column("Reserved GiB", number("reserved_peak_bytes"), "gib"),
    Column("Process GiB", number("process_peak_bytes"), "gib"),
    Column("Baseline GiB", number("baseline_bytes"), "gib"),
    Column("Ranks max/min", number("imbalance_ratio"), "ratio"),
    Column("Host, a rank GiB", number("host_peak_bytes"), "gib"),
    Column("Host, all GiB", number("host_total_bytes"), "gib"),
    Column("Pinned GiB", lambda r: r.numbers.pinned_bytes or None, "gib"),
    Column("NVMe GiB", lambda r: r.numbers.nvme_bytes or None, "gib"),
)
SPLIT = (
    RECIPE,
    Column("Traced peak GiB", traced_peak, "gib"),
    Column("Peak in", lambda r: None if r.first.meter == "cuda" else _peak_phase(r)),
    *(Column(f"{title(name)} GiB", number(f"{name}_bytes"), "gib") for name in CATEGORIES),
    Column("Untraced GiB", number("untraced_bytes"), "gib"),
)
HOST_SPLIT = (
    RECIPE,
    *(Column(f"{title(name)} GiB", _host(name), "gib") for name in CATEGORIES),
)


# ---- DeepSpeed's buckets ----


def zero_block(row: Row) -> dict[str, Any]:
    """The ``zero_optimization`` of DeepSpeed's JSON as the engine used it; empty without one."""
    config = row.first.configs.get("deepspeed")
    block = config.get("zero_optimization") if isinstance(config, dict) else None
    return block if isinstance(block, dict) else {}


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)


def _bucket(name: str) -> Callable[[Row], str | None]:
    def cell(row: Row) -> str | None:
        elements = zero_block(row).get(name)
        if isinstance(elements, bool) or not isinstance(elements, (int, float)):
            return _text_or_none(elements)
        itemsize = 2 if row.numbers.precision in ("bfloat16", "float16") else 4
        return f"{int(elements):,} ({units.one('mib', elements * itemsize)} MiB)"

    return cell


def _overlap(row: Row) -> str | None:
    """Whether communication runs beside the computation."""
    asked = zero_block(row).get("overlap_comm")
    return {True: "yes", False: "no"}.get(asked)


def _second_share(row: Row) -> str | None:
    """Among how many ranks weights lie once more (hpZ)."""
    size = zero_block(row).get("zero_hpz_partition_size", 1)
    return str(size) if size != 1 else None


def _offloaded(row: Row) -> float | None:
    """The share of the optimizer that is offloaded, where that is not all of it."""
    share = (zero_block(row).get("offload_optimizer") or {}).get("ratio", 1.0)
    return share if share < 1 else None


BUCKETS = (
    RECIPE,
    Column("Stage", lambda r: _text_or_none(zero_block(r).get("stage"))),
    Column("overlap_comm", _overlap),
    Column("Second share among", _second_share),
    Column("Offloaded %", _offloaded, "percent"),
    *(Column(name, _bucket(name)) for name in BUCKET_NAMES),
)
