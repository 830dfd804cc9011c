"""The columns of every table: each with its head and unit, its value in a row, and its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.report.data import effect_reasons, nodes, speed
from harness.report.data.grid import Column
from harness.report.data.rows import Row, Unfinished
from harness.report.figures import derive, parity, units
from harness.report.figures.categories import CATEGORIES, title
from harness.report.rendering.drawn import LATENCY, PSNR, SAMPLES
from harness.result import Categories

__all__ = [
    "BUCKETS",
    "CALIBRATED",
    "CATEGORY_ERRORS",
    "EFFECTS",
    "HOST_SPLIT",
    "MEMORY",
    "PARITY",
    "PHASES",
    "PREDICTED",
    "RANKING",
    "SHORT",
    "SIBLINGS",
    "SIMULATED",
    "SPLIT",
    "TIME",
    "TYPES",
    "UNFINISHED",
    "fullest_host",
    "zero_block",
]

BUCKET_NAMES = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_param_persistence_threshold",
    "sub_group_size",
)


# ---- values that several columns take ----


def _number(name: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row.numbers, name)


def _versus(name: str) -> Callable[[Row], Any]:
    return lambda row: None if row.versus.is_reference else getattr(row.versus, name)


def _speed_ratio(alike: str) -> Callable[[Row], Any]:
    """The ratio to the reference's; ``alike`` where the noise explains it."""

    def take(row: Row) -> Any:
        return alike if row.versus.speed_differs is False else _versus("speed_ratio")(row)

    return take


def _host(category: str) -> Callable[[Row], Any]:
    """A category of what the host held."""
    return lambda row: getattr(fullest_host(row), category, None)


def _compiled(fact: str) -> Callable[[Row], Any]:
    return lambda row: row.first.evidence.get("compile", {}).get(fact)


def fullest_host(row: Row) -> Categories | None:
    """What the fullest rank held in host memory at its traced peak: on a GPU by the tensors'
    devices, without one by the engine's placement; None where it held nothing there."""
    ranks = [rank for result in row.results for rank in result.ranks]
    placed = [rank.categories and rank.categories.host for rank in ranks]
    traced = [c for c in (*placed, *(rank.host_categories for rank in ranks)) if c]
    return max(traced, key=lambda categories: categories.total, default=None)


def flags(row: Row) -> str:
    """What a reader must know about a row before its numbers."""
    words = ["front"] if row.versus.front else []
    words += ["noisy"] if row.numbers.noisy else []
    words += [f"{disturbed_steps(row)} steps disturbed"] if row.numbers.disturbed_steps else []
    words += ["network paused?"] if any(map(nodes.paused_steps, row.results)) else []
    words += [row.versus.parity] if row.versus.wrong else []
    words += [kind] if (kind := parity.computation(row.first)) else []
    return ", ".join([*words, *_of_the_peak(row), *row.notes])


def _of_the_peak(row: Row) -> list[str]:
    """Why a row has no peak, or one that has host memory in it."""
    if row.first.meter == "cuda":
        return []
    if row.numbers.peak_bytes is None:
        return ["not traced: see Resident"]
    return ["places unknown"] if (row.numbers.placed_by or "").startswith("unknown") else []


def _on_gpu(name: str) -> Callable[[Row], Any]:
    """A number that is shown of a GPU's rows alone, where it has a meaning of its own."""
    return lambda row: getattr(row.numbers, name) if row.first.meter == "cuda" else None


def _without_gpu(name: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row.numbers, name) if row.first.meter != "cuda" else None


def disturbed_steps(row: Row) -> str | None:
    """In how many timed steps the machine was elsewhere; None where that was not counted."""
    marked = row.numbers.disturbed_steps
    return None if marked is None else f"{marked} of {row.numbers.timed_steps}"


def loss_cell(row: Row) -> str | None:
    """The parity verdict, with the distance wherever it is not equality; of a training."""
    if row.drawn is not None:
        return None
    word, distance = row.versus.parity, row.versus.loss_distance
    if word in ("by design", "beyond design", "DIFFERS") and distance is not None:
        return f"{word} {units.one('distance', distance)}"
    return word


def p10_p90(row: Row) -> str:
    """Both ends of the step time's spread, in ms."""
    ends = [row.numbers.step_seconds_p10, row.numbers.step_seconds_p90]
    return " to ".join(units.column("ms", ends))


def _peak_phase(row: Row) -> str | None:
    return (row.numbers.peak_phase or "").replace("_", " ") or None


def traced_peak(row: Row) -> int | None:
    """Bytes of all categories together; without a GPU that is the peak."""
    sizes = [getattr(row.numbers, f"{name}_bytes") for name in CATEGORIES]
    return None if None in sizes else sum(sizes)


# ---- the tables ----

RANK = Column("#", lambda r: r.versus.rank, "count")
RECIPE = Column("Recipe", lambda r: r.label)
SPEED = Column("Samples/s", _number("samples_per_second"), "rate")
SPEED_RATIO = Column("x ref", _speed_ratio(speed.NONE_SEEN), "ratio")
SHORT_SPEED_RATIO = Column("x ref", _speed_ratio(speed.ALIKE), "ratio")
STEP = Column("Step ms", _number("step_seconds_median"), "ms")
PEAK = Column("Peak GiB", _number("peak_bytes"), "gib")
NEED = Column("Needs GiB", _on_gpu("need_bytes"), "gib")
NEED_CHANGE = Column("vs ref %", _versus("need_change_fraction"), "change")
HOSTED = Column("On host GiB", _number("hosted_bytes"), "gib")
RESIDENT = Column("Resident GiB", _number("resident_peak_bytes"), "gib")
HOST = Column("Host GiB", _number("host_total_bytes"), "gib")
MFU = Column("MFU %", _number("mfu_fraction"), "percent")
LOSS = Column("Loss vs ref", loss_cell)
FLAGS = Column("Notes", flags, "flag")

RANKING = (
    RANK,
    RECIPE,
    SPEED,
    SPEED_RATIO,
    STEP,
    Column("p10 to p90 ms", p10_p90),
    LATENCY,
    PEAK,
    NEED,
    NEED_CHANGE,
    HOSTED,
    RESIDENT,
    HOST,
    MFU,
    LOSS,
    SAMPLES,
    PSNR,
    FLAGS,
)
SIMULATED = (
    RANK,
    RECIPE,
    PEAK,
    NEED,
    NEED_CHANGE,
    HOSTED,
    RESIDENT,
    Column("Reserved GiB", _number("reserved_peak_bytes"), "gib"),
    HOST,
    Column("Step ms, no communication", _number("step_seconds_median"), "ms"),
    Column("Notes", lambda r: "simulated"),
)
SHORT = (
    RANK,
    RECIPE,
    SPEED,
    SHORT_SPEED_RATIO,
    STEP,
    # What rows are ranked by, under its name: without a GPU there is no more to need.
    Column("Peak GiB", _without_gpu("peak_bytes"), "gib"),
    NEED,
    NEED_CHANGE,
    LOSS,
    SAMPLES,
    FLAGS,
)
PHASES = (
    RECIPE,
    *(
        Column(f"{title(phase)} GiB", _number(f"{phase}_metered_bytes"), "gib")
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
    Column("Active GiB", _number("active_peak_bytes"), "gib"),
    Column("Reserved GiB", _number("reserved_peak_bytes"), "gib"),
    Column("Process GiB", _number("process_peak_bytes"), "gib"),
    Column("Baseline GiB", _number("baseline_bytes"), "gib"),
    Column("Ranks max/min", _number("imbalance_ratio"), "ratio"),
    Column("Host, a rank GiB", _number("host_peak_bytes"), "gib"),
    Column("Host, all GiB", _number("host_total_bytes"), "gib"),
    Column("Pinned GiB", lambda r: r.numbers.pinned_bytes or None, "gib"),
    Column("NVMe GiB", lambda r: r.numbers.nvme_bytes or None, "gib"),
)
SPLIT = (
    RECIPE,
    Column("Traced peak GiB", traced_peak, "gib"),
    Column("Peak in", lambda r: None if r.first.meter == "cuda" else _peak_phase(r)),
    *(Column(f"{title(name)} GiB", _number(f"{name}_bytes"), "gib") for name in CATEGORIES),
    Column("Untraced GiB", _number("untraced_bytes"), "gib"),
)
HOST_SPLIT = (
    RECIPE,
    *(Column(f"{title(name)} GiB", _host(name), "gib") for name in CATEGORIES),
)
TIME = (
    RECIPE,
    STEP,
    Column("p10 ms", _number("step_seconds_p10"), "ms"),
    Column("p90 ms", _number("step_seconds_p90"), "ms"),
    Column("Spread %", _number("noise_fraction"), "percent"),
    Column("Steps", _number("timed_steps"), "count"),
    Column("Disturbed", disturbed_steps),
    Column("CPU s a step", _number("step_cpu_seconds_median"), "seconds"),
    Column("Repeats", _number("repeats"), "count"),
    Column("Between repeats %", _number("repeat_spread_fraction"), "percent"),
    Column("TFLOP/s a device", _number("flops_per_second_device"), "tera"),
    Column("Set-up s", _number("setup_seconds"), "seconds"),
    Column("Warm-up s", _number("warmup_seconds"), "seconds"),
    Column("Compile s", _compiled("compile_seconds"), "seconds"),
    Column("Graph breaks", _compiled("graph_breaks"), "count"),
    Column("Whole run s", _number("wall_seconds"), "seconds"),
)


def _type(key: str) -> Callable[[Row], Any]:
    return lambda row: derive.types(row.first.evidence).get(key) or None


TYPES = (
    RECIPE,
    Column("Products", _number("precision")),
    Column("Weights in the model", _type("parameters")),
    Column("Weights that are updated", _type("master")),
    Column("Moments", _type("moments")),
)


def _predicted(name: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row.predicted, name)


def _worst(name: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row.predicted.worst, name, None)


def _seconds(row: Row, name: str) -> float | None:
    return getattr(row.calibrated.predicted, name, None)


PREDICTED = (
    RECIPE,
    Column("By", _predicted("method")),
    Column("Step, predicted GiB", _predicted("step_predicted"), "gib"),
    Column("Step, traced GiB", _predicted("step_measured"), "gib"),
    Column("Step error %", _predicted("step_error"), "error"),
    Column("Worst category", _worst("title")),
    Column("Its error %", _worst("error"), "error"),
    Column("Host, predicted GiB", _predicted("hosted_predicted"), "gib"),
    Column("Host, traced GiB", _predicted("hosted_measured"), "gib"),
    Column("Host error %", _predicted("hosted_error"), "error"),
    Column("Run, predicted GiB", _predicted("run_predicted"), "gib"),
    Column("Run, measured GiB", _predicted("run_measured"), "gib"),
    Column("Run error %", _predicted("run_error"), "error"),
    Column("Reserved, predicted GiB", _predicted("reserved_predicted"), "gib"),
    Column("Reserved, measured GiB", _predicted("reserved_measured"), "gib"),
    Column("Reserved error %", _predicted("reserved_error"), "error"),
    Column("Why no trace", _predicted("reason")),
)
CALIBRATED = (
    RECIPE,
    Column("Step, predicted ms", lambda row: _seconds(row, "total"), "ms"),
    Column("Plus or minus ms", lambda row: _seconds(row, "spread"), "ms"),
    Column("Step, measured ms", lambda row: row.calibrated.measured_seconds, "ms"),
    Column("Time error %", lambda row: row.calibrated.error, "error"),
    Column("By typical figures %", lambda row: row.calibrated.typical_error, "error"),
    Column("Measured peak reached %", lambda row: row.calibrated.peak_fraction, "percent"),
)
CATEGORY_ERRORS = (
    Column("Recipe", lambda pair: pair[0].label),
    Column("Category", lambda pair: pair[1].title),
    Column("Predicted GiB", lambda pair: pair[1].predicted, "gib"),
    Column("Traced GiB", lambda pair: pair[1].measured, "gib"),
    Column("Error %", lambda pair: pair[1].error, "error"),
)
EFFECTS = (
    Column("Adding", lambda e: e.words),
    Column("to", lambda e: e.base.label),
    Column("Samples/s x", lambda e: speed.ratio(e.row, e.base), "ratio"),
    Column("Memory %", lambda e: e.need_change_fraction, "change"),
    Column("Why", effect_reasons.why),
)
SIBLINGS = (
    RECIPE,
    Column("Alters by design", lambda r: parity.design(r.first)),
    Column("Computation", lambda r: parity.computation(r.first) or None),
    Column("Sibling", lambda r: r.versus.sibling),
    Column("Loss distance", lambda r: r.versus.sibling_loss_distance, "distance"),
    Column("Gradient norm distance", lambda r: r.versus.sibling_norm_distance, "distance"),
)
PARITY = (
    RECIPE,
    Column("Promised", lambda r: r.first.parity),
    Column("Loss distance", _versus("loss_distance"), "distance"),
    Column("Gradient norm distance", _versus("grad_norm_distance"), "distance"),
    Column("Moment distance", _versus("moment_distance"), "distance"),
    Column("Update distance", _versus("update_distance"), "distance"),
    Column("Average distance", _versus("average_distance"), "distance"),
    Column("Verdict", lambda r: r.versus.parity),
    Column("Differs in", lambda r: r.versus.differs_in or None),
    Column("First loss", lambda r: r.first.losses[0] if r.first.losses else None, "loss"),
    Column("Last loss", lambda r: r.first.losses[-1] if r.first.losses else None, "loss"),
)


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


BUCKETS = (
    RECIPE,
    Column("Stage", lambda r: _text_or_none(zero_block(r).get("stage"))),
    *(Column(name, _bucket(name)) for name in BUCKET_NAMES),
)


def _phase(unfinished: Unfinished) -> str | None:
    """Where it ended: the phase, and the step within it."""
    phase, step = unfinished.result.phase, unfinished.result.step
    return phase if phase is None or step is None else f"{phase}, step {step}"


def _fit_words(unfinished: Unfinished) -> str | None:
    fit = unfinished.predicted_fit
    return fit and ("yes" if fit.fits else "no")


UNFINISHED = (
    Column("Recipe", lambda u: u.label),
    Column("Status", lambda u: u.status.value),
    Column("In", _phase),
    Column("So far GiB", lambda u: u.so_far_bytes, "gib"),
    Column("Predicted need GiB", lambda u: u.predicted_fit and u.predicted_fit.need_bytes, "gib"),
    Column("Memory GiB", lambda u: u.predicted_fit and u.predicted_fit.have_bytes, "gib"),
    Column("Predicted to fit", _fit_words),
    Column("Why", lambda u: u.reason),
    Column("Way out", lambda u: u.result.way_out),
)
