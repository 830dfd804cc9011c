"""Predicted beside measured, from the predictions' raw files."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from tests.recount.measures import hosted_of, sizes, traced_total
from tests.recount.raw import Row, Run

MIB = 2**20
BESIDE, GROUPS = 822 * MIB, 990 * MIB
"""What a plan adds on an H200: the context with its kernels and cuBLAS's workspaces; and NCCL's
groups under ZeRO-1 and 2 (docs/explanation/accuracy.md has the measurements)."""
SUMS = {
    "parameters": ("parameters", "gathered"),
    "gradients": ("gradients",),
    "optimizer_state": ("optimizer_state",),
    "ema": ("ema",),
    "activations": ("activations", "autocast"),
    "workspace": ("temporaries", "recomputed"),
}
"""Category of a report -> those of a prediction that it sums; buckets count where the prediction
says."""


@dataclass(frozen=True)
class Part:
    """One category of one row's step."""

    row: Row
    name: str
    predicted: int
    traced: int

    @property
    def error(self) -> float:
        return self.predicted / self.traced - 1 if self.traced else math.inf


def prediction(row: Row) -> dict[str, Any] | None:
    return next((run.prediction for run in row.runs if run.prediction), None)


def traced(row: Row) -> dict[str, Any] | None:
    """The rank of the first repetition that a prediction stands for: 0, or of stages one."""
    rank = row.first["ranks"][prediction(row).get("rank", 0)]
    return rank if rank["categories"] else None


def step_predicted(row: Row) -> int | None:
    steady = prediction(row)["steady"]
    return steady and steady["bytes"]


def step_traced(row: Row) -> int | None:
    return traced(row) and traced_total(traced(row)["categories"])


def ratio_error(predicted: int | None, measured: int | None) -> float | None:
    return predicted / measured - 1 if predicted and measured else None


def step_error(row: Row) -> float | None:
    return ratio_error(step_predicted(row), step_traced(row))


def whole_run(found: dict[str, Any]) -> int | None:
    """The peak of one rank's whole run: allocated, where that is known."""
    if found["allocated"] is not None:
        return found["allocated"]
    return found["peak"] and found["peak"]["bytes"]


def libraries(row: Row) -> int:
    """cuBLAS's two workspaces in the caching allocator; 32 MiB each from Hopper on."""
    if not row.group.gpu:
        return 0
    hopper = re.search(r"\bG?H(100|200|800|20)\b", str(row.first["environment"].get("device")))
    return int(2 * (32 if hopper else 8.125) * MIB)


def run_predicted(row: Row) -> int | None:
    size = whole_run(prediction(row))
    return None if size is None else size + libraries(row)


def run_measured(row: Row) -> int | None:
    """The meter's highest, in any phase."""
    return max(sizes(row.first["ranks"], "allocated"), default=None)


def run_error(row: Row) -> float | None:
    return ratio_error(run_predicted(row), run_measured(row))


def hosted_predicted(row: Row) -> int | None:
    kept = prediction(row).get("host_steady")
    return (kept and kept["bytes"]) or None


def hosted_measured(row: Row) -> int | None:
    rank = prediction(row).get("rank", 0)
    return hosted_of(row.first["ranks"][rank : rank + 1])


def hosted_error(row: Row) -> float | None:
    """Not of less than a MiB, which a few pinned samples reach."""
    if max(hosted_predicted(row) or 0, hosted_measured(row) or 0) < MIB:
        return None
    return ratio_error(hosted_predicted(row), hosted_measured(row))


def reserved_predicted(row: Row) -> int | None:
    """In the allocator's mode that ran; the last of a setting that is given twice."""
    settings = str(row.first["environment"].get("allocator") or "").replace(" ", "")
    if "backend:cudaMallocAsync" in settings:
        return None
    modes = re.findall(r"expandable_segments:(\w+)", settings)
    name = "reserved_expandable" if modes[-1:] == ["True"] else "reserved"
    size = prediction(row).get(name)
    return None if size is None else size + libraries(row)


def reserved_measured(row: Row) -> int | None:
    return max(sizes(row.first["ranks"], "reserved"), default=None)


def reserved_error(row: Row) -> float | None:
    return ratio_error(reserved_predicted(row), reserved_measured(row))


def least(run: Run, found: dict[str, Any] | None) -> int | None:
    """On CPUs of all processes together. A GPU's need has what stands beside it, which no raw file
    says: it is recounted for one process on an H200 alone."""
    if found is None:
        return None
    if run.spec["device"] != "cpu":
        known = run.data["environment"].get("device") == "NVIDIA H200"
        groups = GROUPS if re.match("zero[12]", run.spec["recipe"]) else 0
        return found["least"] + BESIDE + groups if known and run.spec["processes"] == 1 else None
    size = whole_run(found)
    return size and size * run.spec["processes"]


def host_memory(run: Run) -> int | None:
    """What a run had: on CPUs the machine's memory, or its container's; else the GPU's."""
    facts = run.data["environment"]
    if run.spec["device"] != "cpu":
        return facts.get("device_bytes")
    known = (facts.get("memory_bytes"), facts.get("container_bytes"))
    return min((size for size in known if size), default=None)


def parts(row: Row) -> list[Part]:
    """The categories of a step above 5 % of its traced peak, predicted or traced."""
    found, rank = prediction(row), traced(row)
    if not found or not found["steady"] or not rank:
        return []
    fine, own = found["steady"]["categories"], rank["categories"]
    buckets = found.get("buckets") or (
        "gradients" if row.recipe.startswith("zero") else "workspace"
    )
    every = []
    for name, names in SUMS.items():
        size = sum(fine[n] for n in names) + (fine["buckets"] if name == buckets else 0)
        every.append(Part(row, name, size, own[name]))
    smallest = 0.05 * traced_total(own)
    return [part for part in every if max(part.predicted, part.traced) > smallest]


def worst(row: Row) -> Part | None:
    return max(parts(row), key=lambda part: abs(part.error), default=None)
