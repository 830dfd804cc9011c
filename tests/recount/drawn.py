"""What rows drew, against what their reference drew: from the latents and labels of raw results.

As docs/how-to/train.md and the note below "Same samples?" state it.
"""

from __future__ import annotations

import base64
import functools
import math
import statistics
import struct
from collections.abc import Callable, Sequence
from typing import Any

from tests.recount.raw import Group, Row, Run

SAME = ("seed", "weights", "init", "model", "objective", "data")
LAST_BIT, LOOSEST = 2**-24, 1e-3


def draws(group: Group) -> bool:
    return bool(group.reference.first.get("drawn"))


def drawing(row: Row) -> dict[str, Any]:
    return row.first["drawn"]


def steps_and_scale(run: Run) -> tuple[int, float]:
    """Of the sampler; 8 steps and a scale of 2 where nothing was said."""
    return run.spec["sampler_steps"] or 8, run.spec["cfg_scale"] or 2.0


@functools.lru_cache(maxsize=256)
def latents(run: Run) -> list[tuple[float, ...]]:
    """The kept samples, each flat."""
    drawn = run.data["drawn"]
    raw = base64.b64decode(drawn["latents"])
    size = math.prod(drawn["shape"][1:])
    flat = struct.unpack(f"<{len(raw) // 4}f", raw)
    return [flat[place : place + size] for place in range(0, len(flat), size)]


def length(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values))


@functools.lru_cache(maxsize=256)
def far(run: Run, base: Run) -> tuple[float, float, float]:
    """Relative L2 of all kept samples, of the worst, and PSNR in decibels."""
    gaps, theirs = [], latents(base)
    for mine, other in zip(latents(run), theirs, strict=True):
        gaps.append([a - b for a, b in zip(mine, other, strict=True)])
    each = [length(gap) / length(other) for gap, other in zip(gaps, theirs, strict=True)]
    gap, whole = ([x for part in parts for x in part] for parts in (gaps, theirs))
    mean = math.fsum(x * x for x in gap) / len(gap)
    psnr = 20 * math.log10((max(whole) - min(whole)) / math.sqrt(mean)) if mean else math.inf
    return length(gap) / length(whole), max(each), psnr


def away(row: Row) -> tuple[float, float, float] | None:
    """Of the repetition that is furthest; nothing of the reference, and of other samples."""
    base = row.group.reference.runs[0]
    if row.is_reference or not alike(row.runs[0], base):
        return None
    return max((far(run, base) for run in row.runs), key=lambda found: found[0])


def alike(run: Run, base: Run) -> bool:
    """Whether they drew the same samples."""
    facts = []
    for one in (run, base):
        drawn = one.data["drawn"]
        own = [one.spec[name] for name in SAME]
        own.append(one.data["configs"].get("initial_weights"))
        facts.append(
            [*own, *steps_and_scale(one), *(drawn[n] for n in ("noise", "labels", "shape"))]
        )
    return facts[0] == facts[1]


def limit(row: Row) -> float:
    """Up to which samples are equal to those of this row."""
    drawn = drawing(row)
    roundings = math.sqrt(drawn["evaluations"] * drawn["products"])
    return min(LOOSEST, 4 * max(drawn["echo"], LAST_BIT) * roundings)


def verdict(run: Run, reference: Row) -> str:
    """The word for a run against the reference."""
    base = reference.runs[0]
    if not alike(run, base):
        return "not comparable"
    apart = far(run, base)[0]
    if not math.isfinite(apart):
        return "DIFFERS"
    if run.data["parity"] != "exact":
        return "by design"
    return "DIFFERS" if apart > limit(reference) else "equal"


def share(row: Row, of: str = "labels") -> float | None:
    """Of a batch: taken for what was asked, or (``of`` "taken_for") for what the reference's is."""
    mine = drawing(row).get("taken_for")
    theirs = drawing(row.group.reference if of == "taken_for" else row).get(of)
    if mine is None or theirs is None or (of == "taken_for" and row.is_reference):
        return None
    return statistics.fmean(a == b for a, b in zip(mine, theirs, strict=True))


def of_drawing(take: Callable[[Row], Any]) -> Callable[[Row], Any]:
    """Nothing of a row that trained."""
    return lambda row: take(row) if row.first.get("drawn") else None


def part(index: int) -> Callable[[Row], Any]:
    def take(row: Row) -> float | None:
        found = away(row)
        return found and found[index]

    return of_drawing(take)


@of_drawing
def latency(row: Row) -> float:
    seconds = [s for run in row.runs for s in run.data["drawn"]["latency_seconds"]]
    return statistics.median(seconds)


DRAWN: dict[str, Callable[[Row], Any]] = {
    "latency_seconds_median": latency,
    "samples_distance": part(0),
    "samples_distance_worst": part(1),
    "samples_psnr_db": part(2),
    "samples_recognised_fraction": of_drawing(share),
    "samples_agreed_fraction": of_drawing(lambda row: share(row, "taken_for")),
    "samples_equal_up_to": of_drawing(lambda row: limit(row.group.reference)),
    "samples_echo": of_drawing(lambda row: drawing(row)["echo"]),
    "evaluations": of_drawing(lambda row: drawing(row)["evaluations"]),
}
"""Column of report.csv -> its value."""
