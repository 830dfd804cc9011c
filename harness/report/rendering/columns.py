"""Columns of all report tables: rankings, memory, time, predictions, and comparisons of rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from harness.report.data import effects, environment, lookup
from harness.report.data.grid import Column
from harness.report.data.rows import Row, Unfinished
from harness.report.figures import derive, parity, units
from harness.report.figures.numbers import Numbers
from harness.report.figures.units import ALL_CATEGORIES, CATEGORIES, title
from harness.result import Categories, is_unplaced

# ---- shared columns ----


def number(name: str) -> Callable[[Row], Any]:
    """Return the function from a row to a field of its ``Numbers``."""
    return lambda row: getattr(row.numbers, name)


def versus(name: str) -> Callable[[Row], Any]:
    """Return the function from a row to a field of its comparison; None for the reference."""
    return lambda row: None if row.versus.is_reference else getattr(row.versus, name)


def _on_gpu(name: str) -> Callable[[Row], Any]:
    """Return the function from a row to a number; None without a GPU, where it has no meaning."""
    return lambda row: getattr(row.numbers, name) if row.first.meter == "cuda" else None


def disturbed_steps(row: Row) -> str | None:
    """Return the number of disturbed timed steps as text; None if not counted."""
    marked = row.numbers.disturbed_steps
    return None if marked is None else f"{marked} of {row.numbers.timed_steps}"


RECIPE = Column("Recipe", lambda r: r.label)
STEP = Column("Step ms", number("step_seconds_median"), "ms")
PEAK = Column("Peak GiB", number("peak_bytes"), "gib")
NEED = Column("Needs GiB", _on_gpu("need_bytes"), "gib")
NEED_CHANGE = Column("vs ref %", versus("need_change_fraction"), "change")
HOSTED = Column("On host GiB", number("hosted_bytes"), "gib")
RESIDENT = Column("Resident GiB", number("resident_peak_bytes"), "gib")


def gathering(row: Row) -> dict[str, Any]:
    """Return FSDP2's facts on gathering in the watched step; empty for other engines."""
    shown = (facts for facts in row.first.evidence.values() if "most_groups_ahead" in facts)
    return next(shown, {})


def _after_forward(row: Row) -> str:
    """Return the state of a block's weights after its forward: freed, kept or resharded."""
    kept = gathering(row)["reshard_after_forward"]
    return {True: "freed", False: "kept"}.get(kept) or f"cut among {kept}"


def _in(fact: str, phase: str) -> Callable[[Row], Any]:
    return lambda row: gathering(row).get(fact, {}).get(phase)


GATHERS = (
    RECIPE,
    Column("Prefetch", lambda r: str(gathering(r)["prefetch"])),
    Column("Behind forward", _after_forward),
    Column("Whole at once", lambda r: gathering(r)["most_groups_at_once"], "count"),
    Column("Groups", lambda r: gathering(r)["groups"], "count"),
    Column("Ahead in forward", _in("most_groups_ahead", "forward"), "count"),
    Column("Ahead in backward", _in("most_groups_ahead", "backward"), "count"),
    Column("Gathered MiB in forward", _in("gathered_bytes", "forward"), "mib"),
    Column("Gathered MiB in backward", _in("gathered_bytes", "backward"), "mib"),
)


# ---- samples ----


def drawn_cell(row: Row) -> str | None:
    """Return the verdict on samples, with their relative distance if they differ."""
    if row.drawn is None:
        return None
    word, away = row.versus.parity, row.drawn.away
    far = away is not None and word in ("by design", "DIFFERS")
    return f"{word} {units.one('distance', away.relative)}" if far else word


def _drawn(name: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row.drawn, name, None)


def _away(name: str) -> Callable[[Row], Any]:
    return lambda row: getattr(getattr(row.drawn, "away", None), name, None)


def psnr(row: Row) -> Any:
    """Return the PSNR in decibels; "same" if no bit differs."""
    found = _away("psnr_db")(row)
    return "same" if found == math.inf else found


def _metered(phase: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row.numbers, f"{phase}_metered_bytes")


LATENCY = Column("Latency of one ms", _drawn("latency_seconds"), "ms")
SAMPLES = Column("Samples vs ref", drawn_cell)
PSNR = Column("PSNR dB", psnr, "ratio")
DRAWING_PHASES = (
    RECIPE,
    Column("Load GiB", _metered("load"), "gib"),
    Column("Prepare GiB", _metered("prepare"), "gib"),
    Column("Warm-up GiB", _metered("first_step"), "gib"),
    Column("Denoise GiB", _metered("steady"), "gib"),
)
DRAWN = (
    RECIPE,
    Column("Promised", lambda r: r.first.parity),
    Column("Relative L2", _away("relative"), "distance"),
    Column("Worst sample", _away("worst"), "distance"),
    PSNR,
    Column("Recognised %", _drawn("recognised"), "percent"),
    Column("Taken as reference's %", _drawn("agreed"), "percent"),
    Column("Equal up to", _drawn("limit"), "distance"),
    Column("Echo of a last bit", _drawn("echo"), "distance"),
    Column("Evaluations", _drawn("evaluations"), "count"),
    Column("Verdict", lambda r: r.versus.parity),
    Column("Differs in", lambda r: r.versus.differs_in or None),
)


# ---- rankings ----


# ---- ranking values ----


def _speed_ratio(row: Row) -> Any:
    """Return a row's speed ratio; ``lookup.SAME`` if the noise explains it."""
    return lookup.SAME if row.versus.speed_differs is False else versus("speed_ratio")(row)


def detail(column: Column) -> Column:
    """Return the column as one that is shown only on request."""
    return dataclasses.replace(column, detail=True)


SECOND = 1.02
"""Ratio of the second step's peak to the first's from which a note warns about one-step peaks."""


def flags(row: Row) -> str:
    """Return the notes that a reader needs before a row's numbers."""
    words = ["front"] if row.versus.front else []
    words += ["noisy"] if row.numbers.noisy else []
    words += [f"{disturbed_steps(row)} steps disturbed"] if row.numbers.disturbed_steps else []
    words += ["network paused?"] if any(map(environment.paused_steps, row.results)) else []
    words += [row.versus.parity] if row.versus.wrong else []
    words += [kind] if (kind := parity.computation(row.first)) else []
    return ", ".join([*words, *_of_the_peak(row), *row.notes])


def _of_the_second_step(found: Numbers) -> list[str]:
    first, steady = found.first_step_metered_bytes, found.steady_metered_bytes
    if not first or not steady or steady < SECOND * first:
        return []
    return [f"second step +{100 * (steady / first - 1):.0f} % memory"]


def _of_the_peak(row: Row) -> list[str]:
    """Return why a row has no peak, or one that includes host memory.

    On a GPU, return the second step's increase over the first, which starts without optimizer
    state.
    """
    if row.first.meter == "cuda":
        return [] if row.drawn else _of_the_second_step(row.numbers)
    if row.numbers.peak_bytes is None:
        return [f"not traced: resident {units.gib(row.numbers.resident_peak_bytes)}"]
    return ["places unknown"] if is_unplaced(row.numbers.placed_by) else []


def loss_cell(row: Row) -> str | None:
    """Return the parity verdict of a training, with the distance if the row is not equal."""
    if row.drawn is not None:
        return None
    word, distance = row.versus.parity, row.versus.loss_distance
    if word in ("by design", "beyond design", "DIFFERS") and distance is not None:
        return f"{word} {units.one('distance', distance)}"
    return word


def p10_p90(row: Row) -> str:
    """Return both ends of the step time's spread, in ms."""
    ends = [row.numbers.step_seconds_p10, row.numbers.step_seconds_p90]
    return " to ".join(units.column("ms", ends))


# ---- ranking tables ----

RANK = Column("#", lambda r: r.versus.rank, "count")
SPEED = Column("Samples/s", number("samples_per_second"), "rate")
SPEED_RATIO = Column("x ref", _speed_ratio, "ratio")
HOST = Column("Host GiB", number("host_total_bytes"), "gib")
MFU = Column("MFU %", number("mfu_fraction"), "percent")
LOSS = Column("Loss vs ref", loss_cell)
FLAGS = Column("Notes", flags, "flag")

RANKING = (
    RANK,
    RECIPE,
    SPEED,
    SPEED_RATIO,
    detail(STEP),
    Column("p10 to p90 ms", p10_p90, detail=True),
    detail(LATENCY),
    PEAK,
    NEED,
    NEED_CHANGE,
    detail(HOSTED),
    detail(RESIDENT),
    detail(HOST),
    detail(MFU),
    LOSS,
    SAMPLES,
    detail(PSNR),
    FLAGS,
)
"""At most eight columns without the details. On a GPU the peak is a detail too."""
SIMULATED = (
    RANK,
    RECIPE,
    PEAK,
    NEED,
    NEED_CHANGE,
    HOSTED,
    RESIDENT,
    Column("Reserved GiB", number("reserved_peak_bytes"), "gib"),
    HOST,
    Column("Step ms, no communication", number("step_seconds_median"), "ms"),
    Column("Notes", lambda r: "simulated"),
)


# ---- unfinished rows ----


def _phase(unfinished: Unfinished) -> str | None:
    """Return where a run ended: the phase, and the step within it."""
    phase, step = unfinished.result.phase, unfinished.result.step
    return phase if phase is None or step is None else f"{phase}, step {step}"


def _fit_words(unfinished: Unfinished) -> str | None:
    fit = unfinished.predicted_fit
    return ("yes" if fit.fits else "no") if fit else None


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


# ---- memory ----
# By phase and by category, and the counts of DeepSpeed's buckets.


BUCKET_NAMES = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_param_persistence_threshold",
    "sub_group_size",
)


# ---- memory values ----


def _host(category: str) -> Callable[[Row], Any]:
    """Return the function from a row to a category of its host memory."""
    return lambda row: getattr(fullest_host(row), category, None)


def fullest_host(row: Row) -> Categories | None:
    """Return the fullest rank's host memory at its traced peak; None if it held nothing there.

    On a GPU the tensors' devices decide; on a CPU the engine's placement does.
    """
    ranks = [rank for result in row.results for rank in result.ranks]
    placed = [rank.categories and rank.categories.host for rank in ranks]
    traced = [c for c in (*placed, *(rank.host_categories for rank in ranks)) if c]
    return max(traced, key=lambda categories: categories.total, default=None)


def _peak_phase(row: Row) -> str | None:
    return (row.numbers.peak_phase or "").replace("_", " ") or None


def traced_peak(row: Row) -> int | None:
    """Return the bytes of all categories together; without a GPU that is the peak."""
    sizes = [getattr(row.numbers, f"{name}_bytes") for name in ALL_CATEGORIES]
    return None if None in sizes else sum(sizes)


# ---- memory tables ----

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
    Column("Other models GiB", lambda row: row.numbers.other_models_bytes or None, "gib"),
    Column("Untraced GiB", number("untraced_bytes"), "gib"),
)
HOST_SPLIT = (
    RECIPE,
    *(Column(f"{title(name)} GiB", _host(name), "gib") for name in CATEGORIES),
)


# ---- DeepSpeed's buckets ----


def zero_block(row: Row) -> dict[str, Any]:
    """Return the ``zero_optimization`` of DeepSpeed's JSON as the engine used it; empty without
    one.
    """
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
    """Return "yes" if communication overlaps with computation."""
    asked = zero_block(row).get("overlap_comm")
    return {True: "yes", False: "no"}.get(asked)


def _second_share(row: Row) -> str | None:
    """Return the number of ranks that share a second copy of the weights (hpZ)."""
    size = zero_block(row).get("zero_hpz_partition_size", 1)
    return str(size) if size != 1 else None


def _offloaded(row: Row) -> float | None:
    """Return the offloaded share of the optimizer, if it is not all of it."""
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


# ---- time and types ----


def _compiled(fact: str) -> Callable[[Row], Any]:
    return lambda row: row.first.evidence.get("compile", {}).get(fact)


def _type(key: str) -> Callable[[Row], Any]:
    return lambda row: derive.types(row.first.evidence).get(key) or None


TIME = (
    RECIPE,
    STEP,
    Column("p10 ms", number("step_seconds_p10"), "ms"),
    Column("p90 ms", number("step_seconds_p90"), "ms"),
    Column("Spread %", number("noise_fraction"), "percent"),
    Column("Steps", number("timed_steps"), "count"),
    Column("Disturbed", disturbed_steps),
    Column("CPU s a step", number("step_cpu_seconds_median"), "seconds"),
    Column("Repeats", number("repeats"), "count"),
    Column("Between repeats %", number("repeat_spread_fraction"), "percent"),
    Column("TFLOP/s a device", number("flops_per_second_device"), "tera"),
    Column("Set-up s", number("setup_seconds"), "seconds"),
    Column("Warm-up s", number("warmup_seconds"), "seconds"),
    Column("Compile s", _compiled("compile_seconds"), "seconds"),
    Column("Graph breaks", _compiled("graph_breaks"), "count"),
    Column("Whole run s", number("wall_seconds"), "seconds"),
)
TYPES = (
    RECIPE,
    Column("Products", number("precision")),
    Column("Weights in the model", _type("parameters")),
    Column("Weights that are updated", _type("master")),
    Column("Moments", _type("moments")),
)


# ---- predictions ----


def _predicted(name: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row.predicted, name)


def _worst(name: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row.predicted.worst, name, None)


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
    Column("Step, predicted ms", lambda row: row.calibrated.predicted_seconds, "ms"),
    Column("Plus or minus ms", lambda row: row.calibrated.spread_seconds, "ms"),
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


# ---- comparisons ----


EFFECTS = (
    Column("Adding", lambda e: e.words),
    Column("to", lambda e: e.base.label),
    Column("Samples/s x", lambda e: lookup.ratio(e.row, e.base), "ratio"),
    Column("Memory %", lambda e: e.need_change_fraction, "change"),
    Column("Why", effects.why),
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
    Column("Loss distance", versus("loss_distance"), "distance"),
    Column("Gradient norm distance", versus("grad_norm_distance"), "distance"),
    Column("Moment distance", versus("moment_distance"), "distance"),
    Column("Update distance", versus("update_distance"), "distance"),
    Column("Average distance", versus("average_distance"), "distance"),
    Column("Verdict", lambda r: r.versus.parity),
    Column("Differs in", lambda r: r.versus.differs_in or None),
    Column("First loss", lambda r: r.first.losses[0] if r.first.losses else None, "loss"),
    Column("Last loss", lambda r: r.first.losses[-1] if r.first.losses else None, "loss"),
)
