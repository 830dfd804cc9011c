"""What each column holds, by the head of its table and its own; and which lines a table has.

To recount a new column, add its head here, with a small function of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.recount import measures as m
from tests.recount import predicted as p
from tests.recount import versus as v
from tests.recount.cells import MIB, Number, change, distance, gib, percent
from tests.recount.raw import Group, Row, Run

__all__ = ["LINES", "TABLES", "UNFINISHED"]

Take = Callable[[Any], Any]


def _gib(take: Take) -> Take:
    return lambda row: gib(take(row))


def _number(take: Take, places: int, scale: float = 1.0) -> Take:
    def cell(row: Any) -> Number | None:
        value = take(row)
        return None if value is None else Number(scale * value, places)

    return cell


def _versus(take: Take) -> Take:
    """Of a row that is not the reference itself."""
    return lambda row: None if row.is_reference else take(row)


def _csv(name: str) -> Take:
    return m.NUMBERS[name]


def _or_none(take: Take) -> Take:
    """A count that is left out where it is nothing."""
    return lambda row: take(row) or None


# ---- cells of words and numbers ----


def p10_to_p90(row: Row) -> tuple[Any, ...]:
    low, high = (Number(1e3 * _csv(f"step_seconds_{end}")(row)) for end in ("p10", "p90"))
    return (low, " to ", high)


def loss(row: Row) -> Any:
    """The verdict, with the distance wherever it is not equality."""
    word = v.parity(row)
    if word in ("by design", "DIFFERS"):
        return (f"{word} ", Number(v.loss_distance(row)))
    return word


def notes(row: Row) -> str | None:
    holds = {"front": v.front(row), "noisy": m.noisy(row), "DIFFERS": v.parity(row) == "DIFFERS"}
    return ", ".join(word for word, it_does in holds.items() if it_does) or None


def phase(row: Row) -> str | None:
    name = m.peak_phase(row)
    return name and name.replace("_", " ")


def compiled(fact: str) -> Take:
    return lambda row: row.evidence.get("compile", {}).get(fact)


def zero_block(row: Row) -> dict[str, Any]:
    config = row.first["configs"].get("deepspeed")
    return config.get("zero_optimization", {}) if isinstance(config, dict) else {}


def bucket(name: str) -> Take:
    def cell(row: Row) -> Any:
        elements = zero_block(row).get(name)
        if not isinstance(elements, int | float) or isinstance(elements, bool):
            return None if elements is None else str(elements)
        bytes_each = 2 if m.precision(row) in ("bfloat16", "float16") else 4
        return (Number(int(elements)), " (", Number(elements * bytes_each / MIB, 2), " MiB)")

    return cell


def host(name: str) -> Take:
    """Of the rank whose host memory was fullest at its traced peak."""

    def cell(row: Row) -> Number:
        traced = [r["host_categories"] for r in row.ranks if r.get("host_categories")]
        return gib(max(traced, key=lambda c: sum(c[n] for n in m.CATEGORIES))[name])

    return cell


def title(name: str) -> str:
    return "EMA" if name == "ema" else name.replace("_", " ").capitalize()


# ---- the tables ----

RECIPE = {"Recipe": lambda row: row.label}
SPEED = {
    "Samples/s": _number(m.samples_per_second, 1),
    "x ref": _versus(_number(v.speed_ratio, 2)),
    "Step ms": _number(m.step_seconds_median, 0, 1e3),
    "p10 to p90 ms": p10_to_p90,
}
PEAK = {
    "Peak GiB": _gib(m.peak_bytes),
    "vs ref %": _versus(lambda row: change(v.peak_change_fraction(row))),
    "Active GiB": _gib(_csv("active_peak_bytes")),
    "Reserved GiB": _gib(_csv("reserved_peak_bytes")),
    "Process GiB": _gib(_csv("process_peak_bytes")),
    "Host GiB": _gib(m.host_total_bytes),
}
RANKING = {
    "#": _number(v.VERSUS["rank"], 0),
    **RECIPE,
    "Processes": _number(lambda row: row.spec["processes"], 0),
    **SPEED,
    **PEAK,
    "MFU %": lambda row: percent(m.mfu_fraction(row)),
    "Loss vs ref": loss,
    "Notes": notes,
}
TABLES: dict[str, dict[str, Take]] = {
    "Ranking": RANKING,
    "Peak of each phase": {
        **RECIPE,
        **{f"{title(n)} GiB": _gib(m.phase_peak(n)) for n in m.PHASES},
        "Peak in": phase,
    },
    "What the peak is made of": {
        **RECIPE,
        **{f"{title(name)} GiB": _gib(m.category(name)) for name in m.CATEGORIES},
        "Untraced GiB": _gib(m.untraced_bytes),
    },
    "What the host holds": {
        **RECIPE,
        **{f"{title(name)} GiB": host(name) for name in m.CATEGORIES},
    },
    "Memory, all counts": {
        **RECIPE,
        **PEAK,
        "Baseline GiB": _gib(_csv("baseline_bytes")),
        "Ranks max/min": _number(m.imbalance_ratio, 2),
        "Host, a rank GiB": _gib(_csv("host_peak_bytes")),
        "Host, all GiB": _gib(m.host_total_bytes),
        "Pinned GiB": _gib(_or_none(_csv("pinned_bytes"))),
        "NVMe GiB": _gib(_or_none(m.nvme_bytes)),
    },
    "Precision": {
        **RECIPE,
        "Products": m.precision,
        "Weights in the model": lambda row: m.types(row).get("parameters") or None,
        "Weights that are updated": lambda row: m.types(row).get("master") or None,
        "Moments": lambda row: m.types(row).get("moments") or None,
    },
    "Predicted and measured": {
        **RECIPE,
        "By": lambda row: p.prediction(row)["method"],
        "Step, predicted GiB": _gib(p.step_predicted),
        "Step, traced GiB": _gib(p.step_traced),
        "Step error %": lambda row: change(p.step_error(row), 2),
        "Worst category": lambda row: p.worst(row) and p.worst(row).title,
        "Its error %": lambda row: p.worst(row) and change(p.worst(row).error, 2),
        "Run, predicted GiB": _gib(p.run_predicted),
        "Run, measured GiB": _gib(p.run_measured),
        "Run error %": lambda row: change(p.run_error(row), 2),
        "Why no trace": lambda row: p.prediction(row)["reason"] or None,
    },
    "Predicted and traced, by category": {
        "Recipe": lambda part: part.row.label,
        "Category": lambda part: part.title,
        "Predicted GiB": lambda part: gib(part.predicted),
        "Traced GiB": lambda part: gib(part.traced),
        "Error %": lambda part: change(part.error, 2),
    },
    "Time": {
        **RECIPE,
        **SPEED,
        "p10 ms": _number(_csv("step_seconds_p10"), 0, 1e3),
        "p90 ms": _number(_csv("step_seconds_p90"), 0, 1e3),
        "Spread %": lambda row: percent(m.noise_fraction(row)),
        "Steps": _number(lambda row: len(m.steps(row)), 0),
        "Repeats": _number(lambda row: len(row.runs), 0),
        "Between repeats %": lambda row: percent(m.repeat_spread_fraction(row)),
        "TFLOP/s a device": _number(m.flops_per_second_device, 1, 1e-12),
        "Set-up s": _number(m.setup_seconds, 1),
        "Warm-up s": _number(m.warmup_seconds, 1),
        "Compile s": _number(compiled("compile_seconds"), 1),
        "Graph breaks": _number(compiled("graph_breaks"), 0),
        "Whole run s": _number(m.wall_seconds, 1),
    },
    "Same computation?": {
        **RECIPE,
        "Promised": lambda row: row.first["parity"],
        "Loss distance": _versus(lambda row: distance(v.loss_distance(row))),
        "Gradient norm distance": _versus(lambda row: distance(v.grad_norm_distance(row))),
        "Verdict": v.parity,
        "First loss": _number(lambda row: row.first["losses"][0], 4),
        "Last loss": _number(lambda row: row.first["losses"][-1], 4),
    },
    "DeepSpeed buckets": {
        **RECIPE,
        "Stage": lambda row: str(zero_block(row)["stage"]),
        **{
            name: bucket(name)
            for name in (
                *("reduce_bucket_size", "allgather_bucket_size", "sub_group_size"),
                *("stage3_prefetch_bucket_size", "stage3_max_live_parameters"),
                "stage3_param_persistence_threshold",
            )
        },
    },
    "What each part does": {
        "Adding": lambda pair: pair.part,
        "to": lambda pair: pair.base.label,
        "Samples/s x": lambda pair: Number(pair.speed, 2),
        "Peak %": lambda pair: change(pair.peak),
    },
}
"""Title of a table -> head of a column -> what it says of a line's subject."""


# ---- the subjects of a table's lines ----


class Effect:
    """Two rows on equally many processes that differ in one added part."""

    def __init__(self, base: Row, row: Row) -> None:
        self.base, (self.part,) = base, row.parts - base.parts
        self.speed = m.samples_per_second(row) / m.samples_per_second(base)
        peaks = m.peak_bytes(row), m.peak_bytes(base)
        self.peak = peaks[0] / peaks[1] - 1 if all(peaks) else None


def effects(group: Group) -> list[Effect]:
    rows = v.ranked(group)
    pairs = [
        Effect(base, row)
        for base in rows
        for row in rows
        if base.parts < row.parts and len(row.parts - base.parts) == 1
        if base.spec["processes"] == row.spec["processes"]
    ]
    return sorted(pairs, key=lambda pair: pair.part)


def _rows(wanted: Take) -> Callable[[Group], list[Row]]:
    return lambda group: [row for row in v.ranked(group) if wanted(row)]


def _parts(group: Group) -> Sequence[p.Part]:
    return [part for row in v.ranked(group) if p.prediction(row) for part in p.parts(row)]


LINES: dict[str, Callable[[Group], Sequence[Any]]] = {
    "What the peak is made of": _rows(m.fullest),
    "What the host holds": _rows(lambda row: any(r.get("host_categories") for r in row.ranks)),
    "Precision": _rows(m.types),
    "Predicted and measured": _rows(p.prediction),
    "Predicted and traced, by category": _parts,
    "DeepSpeed buckets": _rows(zero_block),
    "What each part does": effects,
}
"""Title -> the subjects of its lines, in order; every row, fastest first, where it is not here."""


def _ended(run: Run) -> str | None:
    name, step = run.data["phase"], run.data["step"]
    return name if name is None or step is None else f"{name}, step {step}"


def _why(run: Run) -> str | None:
    """The reason; for a run that was not what was asked, the first check that does not hold."""
    failed = next((check for check in run.data["audit"] if not check["ok"]), None)
    if run.data["status"] == "ok" and failed:
        return f"{failed['name']}: asked {failed['asked']}, found {failed['found']}"
    return run.data["reason"]


UNFINISHED: dict[str, Take] = {
    "Recipe": lambda run: run.spec["recipe"],
    "Status": lambda run: run.status,
    "In": _ended,
    "Peak so far GiB": _gib(lambda run: run.data["peak_so_far_bytes"] or m.peak_of(run.ranks)),
    "Why": _why,
    "Way out": lambda run: run.data["way_out"],
}
"""The table of what did not finish."""
