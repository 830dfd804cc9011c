"""The answers in words: what fits, what is fastest, what is the best trade.

Only rows that may be believed are named: a row whose loss DIFFERS though it should not is left
out, and said to be.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from harness.report import derive, surroundings, units
from harness.report.rows import Group, Report, Row, label
from harness.result import Status

__all__ = ["Answer", "Fit", "answers", "fits", "stamp", "summary"]

GPU_LIMITS_GIB = (8, 12, 16, 24, 40, 48, 80, 96, 141)
ROUND = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
MOST_LIMITS = 5
CLOSE = 3


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A question, the row that answers it (None: none does), and one sentence."""

    question: str
    row: Row | None
    text: str


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The fastest row that fits in ``limit_bytes``; None: no row that was measured does.

    It is the answer up to ``upto_bytes`` as well, the next larger size asked about; None: for
    every larger size.
    """

    limit_bytes: float
    upto_bytes: float | None
    row: Row | None

    @property
    def sizes(self) -> str:
        """The sizes of memory in GiB for which this is the answer, in words."""
        low = f"{self.limit_bytes / units.GIB:g}"
        if self.upto_bytes is None:
            return f"from {low}"
        high = f"{self.upto_bytes / units.GIB:g}"
        return low if low == high else f"{low} to {high}"


def believable(group: Group) -> list[Row]:
    """Rows that an answer may name."""
    return [
        row
        for row in group.rows
        if row.versus.parity != "DIFFERS" and row.numbers.need_bytes is not None
    ]


def answers(group: Group) -> list[Answer]:
    """Fastest, fastest unchanged computation, least memory, best trade."""
    if group.world:  # its times leave communication out, and its losses mean nothing
        return []
    rows = believable(group)
    if not rows:
        return [Answer(question="Fastest", row=None, text="no row can be believed")]
    found = [_fastest(rows)]
    if len(rows) == 1:
        return found
    exact = [row for row in rows if row.versus.parity in ("equal", "equal losses", "reference")]
    if exact and exact[0] is not rows[0]:
        found.append(Answer(question="Fastest, same loss", row=exact[0], text=_speed(exact[0])))
    least = min(rows, key=lambda r: (r.numbers.peak_bytes, -r.numbers.samples_per_second))
    found.append(Answer(question="Least memory", row=least, text=_memory(least, rows[0])))
    return [*found, _compromise(rows)]


def _fastest(rows: list[Row]) -> Answer:
    best, text = rows[0], _speed(rows[0])
    ends = _ends(best)
    close = [row.label for row in rows[1:] if derive.overlap(ends, _ends(row))]
    if close:
        text += f"; within its noise: {', '.join(close[:CLOSE])}"
        text += f" and {len(close) - CLOSE} more" if len(close) > CLOSE else ""
    return Answer(question="Fastest", row=best, text=text)


def _ends(row: Row) -> tuple[float, float]:
    return row.numbers.step_seconds_p10, row.numbers.step_seconds_p90


def _speed(row: Row) -> str:
    numbers = row.numbers
    text = f"{units.one('rate', numbers.samples_per_second)} samples/s"
    if not row.versus.is_reference:
        text += f" (x{row.versus.speed_ratio:.2f})"
    return f"{text}, peak {units.gib(numbers.peak_bytes)} a device{_design(row)}"


def _memory(row: Row, fastest: Row) -> str:
    share = row.numbers.samples_per_second / fastest.numbers.samples_per_second
    text = f"peak {units.gib(row.numbers.peak_bytes)} a device"
    change = row.versus.peak_change_fraction
    if not row.versus.is_reference and change is not None:
        text += f" ({units.one('change', change)} %)"
    if row is not fastest:
        text += f", at {units.one('percent', share)} % of the fastest row's samples/s"
    return text + _design(row)


def _design(row: Row) -> str:
    if row.versus.parity != "by design":
        return ""
    return f"; changes the computation by design (loss {row.versus.loss_distance:.1e} away)"


def _compromise(rows: list[Row]) -> Answer:
    question = "Best trade"
    front = [row for row in rows if row.versus.front]
    points = [(r.numbers.peak_bytes, r.numbers.samples_per_second) for r in front]
    best = derive.compromise(points)
    if best is None:
        text = "no other row saves a larger share of this one's memory than of its speed"
        return Answer(question=question, row=rows[0], text=text)
    row, top = front[best], max(front, key=lambda r: r.numbers.samples_per_second)
    slower = 1 - row.numbers.samples_per_second / top.numbers.samples_per_second
    saved = 1 - row.numbers.peak_bytes / top.numbers.peak_bytes
    text = (
        f"saves {units.one('percent', saved)} % of the fastest row's memory for "
        f"{units.one('percent', slower)} % of its speed, the largest margin on the front"
    )
    return Answer(question=question, row=row, text=text + _design(row))


def fits(group: Group) -> list[Fit]:
    """The fastest row for each of a few sizes of device memory; like answers as one."""
    rows = believable(group)
    if group.world:
        return []
    found: list[Fit] = []
    for limit in limits(group):
        row = next((row for row in rows if row.numbers.need_bytes <= limit), None)
        if found and found[-1].row is row:
            found[-1] = dataclasses.replace(found[-1], upto_bytes=limit)
        else:
            found.append(Fit(limit_bytes=limit, upto_bytes=limit, row=row))
    if found and found[-1].row is not None:
        found[-1] = dataclasses.replace(found[-1], upto_bytes=None)
    return found


def limits(group: Group) -> list[float]:
    """Sizes of memory to answer for, in bytes: GPUs' own, or round values around the peaks."""
    needs = sorted(row.numbers.need_bytes for row in believable(group))
    if not needs:
        return []
    if group.meter == "cuda":
        return [gib * units.GIB for gib in GPU_LIMITS_GIB]
    found = sorted({_round_up(need / units.GIB) for need in needs if need > 0})
    keep = min(MOST_LIMITS, len(found))
    picks = [round(i * (len(found) - 1) / max(keep - 1, 1)) for i in range(keep)]
    return [found[i] * units.GIB for i in picks]


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next((r * power for r in ROUND if r * power >= value), 10 * power)


def stamp(group: Group) -> str:
    """What these numbers are, and what they cannot be compared with."""
    return f"{_simulated(group)} {_meter(group)}" if group.world else _meter(group)


def _simulated(group: Group) -> str:
    return (
        f"SIMULATED WORLD: one process stood for rank 0 of {group.world}. Memory is that rank's, "
        "real, without what the communication library itself holds. Time is computation without "
        "communication. Losses mean nothing and are not kept. Ordered by peak; never ranked with "
        "real rows, and in no answer."
    )


def _meter(group: Group) -> str:
    where = f"{group.device}, {_processes(group)}"
    if group.meter == "cuda":
        return f"Measured on {where}; device memory is the caching allocator's."
    return (
        f"Measured without a GPU, on CPU processes ({where}). Device memory here is the resident "
        "high-water mark of a process above a baseline taken before the model was built. "
        "Offload to host memory cannot show a saving here. "
        "These numbers are NOT comparable with a GPU's."
    )


def _processes(group: Group) -> str:
    counts = sorted({row.spec.processes for row in group.rows})
    word = "process" if counts == [1] else "processes"
    return f"{' or '.join(map(str, counts))} {word}"


def setting(group: Group) -> str:
    """What all rows of a group share."""
    spec, first = group.reference.spec, group.reference.first
    return (
        f"{spec.model} ({first.parameters / 1e6:.1f} M parameters) on {spec.data}, "
        f"{spec.objective} objective, global batch {spec.global_batch}, seed {spec.seed}, "
        f"{spec.warmup} warm-up + {spec.steps} timed steps"
    )


def warnings(group: Group) -> list[str]:
    """What a reader of this group must know, one sentence each."""
    wrong = [row.label for row in group.rows if row.versus.parity == "DIFFERS"]
    noisy = [row.label for row in group.rows if row.numbers.noisy]
    counts = {row.spec.processes for row in group.rows}
    found = []
    if wrong:
        found.append(
            f"DIFFERS: {', '.join(wrong)} should compute what the reference does and does not; "
            "left out of the answers and of the front."
        )
    if noisy:
        found.append(f"Noisy step times: {', '.join(noisy)}. More --steps, or a quieter machine.")
    if len(counts) > 1:
        found.append("Rows differ in their number of processes; samples/s is of the whole job.")
    for name, values in surroundings.differing(group.rows).items():
        found.append(f"Rows were not all measured alike: {name} is {' / '.join(values)}.")
    found += _flops(group)
    notes = dict.fromkeys(n for row in group.rows for r in row.results for n in r.meter_notes)
    return [*found, *(f"Meter: {note}." for note in notes)]


def _flops(group: Group) -> list[str]:
    """Which rows have no FLOP/s, and why a GPU's rows have no MFU."""
    uncounted = [row.label for row in group.rows if row.numbers.flops_per_second is None]
    counted = [row.numbers for row in group.rows if row.label not in uncounted]
    reasons = dict.fromkeys(n.mfu_missing for n in counted if n.mfu_missing)
    found = [f"No MFU: {reason}." for reason in reasons if group.meter == "cuda"]
    if uncounted:
        found.append(f"No FLOP/s: {', '.join(uncounted)}. {derive.NO_FLOPS}.")
    return found


def summary(report: Report) -> str:
    """One sentence: how many rows ended how."""
    rows = sum(len(group.rows) for group in report.groups)
    gone: dict[str, list[str]] = {}
    for one in report.unfinished:
        gone.setdefault(one.status.value, []).append(one.label)
    recorded = [label(result.spec) for result in report.recorded if result.status is Status.OK]
    if recorded:
        gone["recorded"] = recorded
    if not rows and not gone:
        return "No run finished: the result set is empty."
    counts = [f"{len(names)} {word} ({', '.join(names)})" for word, names in gone.items()]
    text = ", ".join([f"{rows} measured", *counts])
    if recorded and not rows:
        return f"Nothing to rank: {', '.join(counts)}."
    return f"{text}." if rows else f"No run finished: {', '.join(counts)}."
