"""All tables of a report: their columns, titles, rows and marks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from harness.report.data import effects, lookup
from harness.report.data.answers import FastestThatFits, fastest_that_fits
from harness.report.data.grid import Column, Grid, tabulate
from harness.report.data.rows import Group, Report, Row, Unfinished, label
from harness.report.figures import derive, parity, units
from harness.report.figures.units import ALL_CATEGORIES, CATEGORIES, title
from harness.report.rendering.explanations import NOTES
from harness.result import Categories, Result, is_unplaced

Cell = Callable[[Row], Any]
"""Returns the value of a row in one column."""

# ---- ranking ----

SECOND = 1.02
"""Ratio of the second step's peak to the first's from which a note warns about one-step peaks."""


def number(name: str) -> Cell:
    """Return the function from a row to a field of its ``Numbers``."""
    return lambda row: getattr(row.numbers, name)


def versus(name: str) -> Cell:
    """Return the function from a row to a field of its comparison; None for the reference."""
    return lambda row: None if row.versus.is_reference else getattr(row.versus, name)


def detail(column: Column) -> Column:
    """Return the column as one that is shown only on request."""
    return dataclasses.replace(column, detail=True)


def _needed(row: Row) -> int | None:
    """Return the need; None without a GPU, where it is the peak."""
    return row.numbers.need_bytes if row.first.meter == "cuda" else None


def _speed_ratio(row: Row) -> Any:
    """Return the ratio of speeds, "same", or the interval that the noise leaves open."""
    if row.versus.speed_same:
        return lookup.SAME
    found = row.versus.speed_ratio
    if row.versus.speed_differs is not False:
        return versus("speed_ratio")(row)
    width = 1 + row.versus.speed_margin_fraction
    return f"{found / width:.2f}-{found * width:.2f}"


def _rank(row: Row) -> Any:
    """Return the ranks that the noise leaves to a row: "3", or "1-4"."""
    first, last = row.versus.rank, row.versus.last_rank
    return first if first == last else f"{first}-{last}"


def _p10_p90(row: Row) -> str:
    ends = [row.numbers.step_seconds_p10, row.numbers.step_seconds_p90]
    return " to ".join(units.column("ms", ends))


def _loss(row: Row) -> str | None:
    """Return the parity verdict of a training, with the distance if the row is not equal."""
    if row.drawn is not None:
        return None
    word, distance = row.versus.parity, row.versus.loss_distance
    if word in ("by design", "beyond design", "DIFFERS") and distance is not None:
        return f"{word} {units.one('distance', distance)}"
    return word


def _disturbed(row: Row) -> str | None:
    marked = row.numbers.disturbed_steps
    return None if marked is None else f"{marked} of {row.numbers.timed_steps}"


def flags(row: Row) -> str:
    """Return the notes that a reader needs before a row's numbers."""
    words = ["front"] if row.versus.front else []
    words += ["noisy"] if row.numbers.noisy else []
    words += [f"{_disturbed(row)} steps disturbed"] if row.numbers.disturbed_steps else []
    words += ["network paused?"] if any(map(derive.paused_steps, row.results)) else []
    words += [row.versus.parity] if row.versus.wrong else []
    words += [kind] if (kind := parity.computation(row.first)) else []
    return ", ".join([*words, *_of_the_peak(row), *row.notes])


def _of_the_peak(row: Row) -> list[str]:
    """Return why a row has no peak, or one that includes host memory.

    On a GPU, return the second step's increase over the first, which starts without optimizer
    state.
    """
    found = row.numbers
    if row.first.meter == "cuda":
        first, steady = found.first_step_metered_bytes, found.steady_metered_bytes
        if row.drawn or not first or not steady or steady < SECOND * first:
            return []
        return [f"second step +{100 * (steady / first - 1):.0f} % memory"]
    if found.peak_bytes is None:
        return [f"not traced: resident {units.gib(found.resident_peak_bytes)}"]
    return ["places unknown"] if is_unplaced(found.placed_by) else []


RANK = Column("#", _rank, "count")
RECIPE = Column("Recipe", lambda r: r.label)
STEP = Column("Step ms", number("step_seconds_median"), "ms")
PEAK = Column("Peak GiB", number("peak_bytes"), "gib")
NEED = Column("Needs GiB", _needed, "gib")
NEED_CHANGE = Column("vs ref %", versus("need_change_fraction"), "change")
HOSTED = Column("On host GiB", number("hosted_bytes"), "gib")
RESIDENT = Column("Resident GiB", number("resident_peak_bytes"), "gib")
HOST = Column("Host GiB", number("host_total_bytes"), "gib")
RESERVED = Column("Reserved GiB", number("reserved_peak_bytes"), "gib")


# ---- samples ----


def _drawn_verdict(row: Row) -> str | None:
    """Return the verdict on samples, with their relative distance if they differ."""
    if row.drawn is None:
        return None
    word, away = row.versus.parity, row.drawn.away
    far = away is not None and word in ("by design", "DIFFERS")
    return f"{word} {units.one('distance', away.relative)}" if far else word


def _drawn(name: str) -> Cell:
    return lambda row: getattr(row.drawn, name, None)


def _away(name: str) -> Cell:
    return lambda row: getattr(getattr(row.drawn, "away", None), name, None)


def _psnr(row: Row) -> Any:
    """Return the PSNR in decibels; "same" if no bit differs."""
    found = _away("psnr_db")(row)
    return "same" if found == math.inf else found


PSNR = Column("PSNR dB", _psnr, "ratio")
DRAWING_PHASES = (
    RECIPE,
    Column("Load GiB", number("load_metered_bytes"), "gib"),
    Column("Prepare GiB", number("prepare_metered_bytes"), "gib"),
    Column("Warm-up GiB", number("first_step_metered_bytes"), "gib"),
    Column("Denoise GiB", number("steady_metered_bytes"), "gib"),
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
RANKING = (
    RANK,
    RECIPE,
    Column("Samples/s", number("samples_per_second"), "rate"),
    Column("x ref", _speed_ratio, "ratio"),
    detail(STEP),
    Column("p10 to p90 ms", _p10_p90, detail=True),
    Column("Latency of one ms", _drawn("latency_seconds"), "ms", detail=True),
    PEAK,
    NEED,
    NEED_CHANGE,
    *map(detail, (HOSTED, RESIDENT, HOST)),
    Column("MFU %", number("mfu_fraction"), "percent", detail=True),
    Column("Loss vs ref", _loss),
    Column("Samples vs ref", _drawn_verdict),
    detail(PSNR),
    Column("Notes", flags, "flag"),
)
"""At most eight columns without the details. On a GPU the peak is a detail too."""
SIMULATED = (
    *(RANK, RECIPE, PEAK, NEED, NEED_CHANGE, HOSTED, RESIDENT, RESERVED, HOST),
    Column("Step ms, no communication", number("step_seconds_median"), "ms"),
    Column("Notes", lambda r: "simulated"),
)


# ---- unfinished, recorded and memory-only runs ----


def _phase(unfinished: Unfinished) -> str | None:
    """Return where a run ended: the phase, and the step within it."""
    phase, step = unfinished.result.phase, unfinished.result.step
    return phase if phase is None or step is None else f"{phase}, step {step}"


def _predicted_to_fit(unfinished: Unfinished) -> str | None:
    fit = unfinished.predicted_fit
    return ("yes" if fit.fits else "no") if fit else None


UNFINISHED = (
    Column("Recipe", lambda u: u.label),
    Column("Status", lambda u: u.status.value),
    Column("In", _phase),
    Column("So far GiB", lambda u: u.so_far_bytes, "gib"),
    Column("Predicted need GiB", lambda u: u.predicted_fit and u.predicted_fit.need_bytes, "gib"),
    Column("Memory GiB", lambda u: u.predicted_fit and u.predicted_fit.have_bytes, "gib"),
    Column("Predicted to fit", _predicted_to_fit),
    Column("Why", lambda u: u.reason),
    Column("Way out", lambda u: u.result.way_out),
)
AVERAGES = (
    Column("Operation", lambda r: r["name"]),
    Column("Calls", lambda r: r["calls"], "count"),
    Column("Own CPU ms", lambda r: r["self_cpu_seconds"], "ms"),
    Column("Own device ms", lambda r: r["self_device_seconds"] or None, "ms"),
    Column("CPU MiB, net", lambda r: r["cpu_bytes"], "mib"),
    Column("Device MiB, net", lambda r: r["device_bytes"] or None, "mib"),
)
MEMORY_ONLY = (
    Column("Recipe", lambda r: label(r.spec)),
    Column("Model", lambda r: r.spec.model),
    Column("Batch", lambda r: r.spec.global_batch, "count"),
    Column("Peak GiB", lambda r: derive.peak_of(r.ranks), "gib"),
    Column("Reserved GiB", lambda r: derive.highest(r.ranks, "reserved"), "gib"),
    Column("Needs GiB", lambda r: derive.need_bytes(r.ranks, r.meter), "gib"),
    Column("Beside", lambda r: r.beside - 1, "count"),
)


# ---- memory ----


def fullest_host(row: Row) -> Categories | None:
    """Return the fullest rank's host memory at its traced peak; None if it held nothing there.

    On a GPU the tensors' devices decide; on a CPU the engine's placement does.
    """
    ranks = [rank for result in row.results for rank in result.ranks]
    placed = [rank.categories and rank.categories.host for rank in ranks]
    traced = [c for c in (*placed, *(rank.host_categories for rank in ranks)) if c]
    return max(traced, key=lambda categories: categories.total, default=None)


def _host(category: str) -> Cell:
    return lambda row: getattr(fullest_host(row), category, None)


def _peak_phase(row: Row) -> str | None:
    return (row.numbers.peak_phase or "").replace("_", " ") or None


def _traced_peak(row: Row) -> int | None:
    """Return the bytes of all categories together; without a GPU that is the peak."""
    sizes = [getattr(row.numbers, f"{name}_bytes") for name in ALL_CATEGORIES]
    return None if None in sizes else sum(sizes)


PHASES = (
    RECIPE,
    *(Column(f"{title(p)} GiB", number(f"{p}_metered_bytes"), "gib") for p in derive.PHASES),
    Column("Peak in", lambda r: _peak_phase(r) if r.first.meter == "cuda" else None),
)
MEMORY = (
    *(RECIPE, PEAK, NEED, HOSTED, RESIDENT),
    Column("Active GiB", number("active_peak_bytes"), "gib"),
    RESERVED,
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
    Column("Traced peak GiB", _traced_peak, "gib"),
    Column("Peak in", lambda r: None if r.first.meter == "cuda" else _peak_phase(r)),
    *(Column(f"{title(name)} GiB", number(f"{name}_bytes"), "gib") for name in CATEGORIES),
    Column("Other models GiB", lambda row: row.numbers.other_models_bytes or None, "gib"),
    Column("Untraced GiB", number("untraced_bytes"), "gib"),
)
HOST_SPLIT = (RECIPE, *(Column(f"{title(n)} GiB", _host(n), "gib") for n in CATEGORIES))


# ---- settings of engines ----


def _zero_block(row: Row) -> dict[str, Any]:
    """Return ``zero_optimization`` of DeepSpeed's JSON as the engine used it; {} without one."""
    config = row.first.configs.get("deepspeed")
    block = config.get("zero_optimization") if isinstance(config, dict) else None
    return block if isinstance(block, dict) else {}


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)


def _bucket(name: str) -> Cell:
    def cell(row: Row) -> str | None:
        elements = _zero_block(row).get(name)
        if isinstance(elements, bool) or not isinstance(elements, (int, float)):
            return _text_or_none(elements)
        itemsize = 2 if row.numbers.precision in ("bfloat16", "float16") else 4
        return f"{int(elements):,} ({units.one('mib', elements * itemsize)} MiB)"

    return cell


def _second_share(row: Row) -> str | None:
    """Return the number of ranks that share a second copy of the weights (hpZ)."""
    size = _zero_block(row).get("zero_hpz_partition_size", 1)
    return str(size) if size != 1 else None


def _offloaded(row: Row) -> float | None:
    """Return the offloaded share of the optimizer, if it is not all of it."""
    share = (_zero_block(row).get("offload_optimizer") or {}).get("ratio", 1.0)
    return share if share < 1 else None


BUCKET_NAMES = (
    *("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"),
    *("stage3_max_live_parameters", "stage3_param_persistence_threshold", "sub_group_size"),
)
YES_NO = {True: "yes", False: "no"}
BUCKETS = (
    RECIPE,
    Column("Stage", lambda r: _text_or_none(_zero_block(r).get("stage"))),
    Column("overlap_comm", lambda r: YES_NO.get(_zero_block(r).get("overlap_comm"))),
    Column("Second share among", _second_share),
    Column("Offloaded %", _offloaded, "percent"),
    *(Column(name, _bucket(name)) for name in BUCKET_NAMES),
)


def _gathering(row: Row) -> dict[str, Any]:
    """Return FSDP2's facts on gathering in the watched step; empty for other engines."""
    shown = (facts for facts in row.first.evidence.values() if "most_groups_ahead" in facts)
    return next(shown, {})


def _after_forward(row: Row) -> str:
    """Return the state of a block's weights after its forward: freed, kept or resharded."""
    kept = _gathering(row)["reshard_after_forward"]
    return {True: "freed", False: "kept"}.get(kept) or f"cut among {kept}"


def _in(fact: str, phase: str) -> Cell:
    return lambda row: _gathering(row).get(fact, {}).get(phase)


GATHERS = (
    RECIPE,
    Column("Prefetch", lambda r: str(_gathering(r)["prefetch"])),
    Column("Behind forward", _after_forward),
    Column("Whole at once", lambda r: _gathering(r)["most_groups_at_once"], "count"),
    Column("Groups", lambda r: _gathering(r)["groups"], "count"),
    Column("Ahead in forward", _in("most_groups_ahead", "forward"), "count"),
    Column("Ahead in backward", _in("most_groups_ahead", "backward"), "count"),
    Column("Gathered MiB in forward", _in("gathered_bytes", "forward"), "mib"),
    Column("Gathered MiB in backward", _in("gathered_bytes", "backward"), "mib"),
)


def _compiled(fact: str) -> Cell:
    return lambda row: row.first.evidence.get("compile", {}).get(fact)


def _type(key: str) -> Cell:
    return lambda row: derive.types(row.first.evidence).get(key) or None


TIME = (
    RECIPE,
    STEP,
    Column("p10 ms", number("step_seconds_p10"), "ms"),
    Column("p90 ms", number("step_seconds_p90"), "ms"),
    Column("Spread %", number("noise_fraction"), "percent"),
    Column("Steps", number("timed_steps"), "count"),
    Column("Disturbed", _disturbed),
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


def _predicted(name: str) -> Cell:
    return lambda row: getattr(row.predicted, name)


def _worst(name: str) -> Cell:
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
    Column("From ms", lambda row: row.calibrated.low_seconds, "ms"),
    Column("To ms", lambda row: row.calibrated.high_seconds, "ms"),
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


# ---- tables ----


def ranking(group: Group) -> Grid:
    """Return the rows of a group, fastest first, with their differences from the reference."""
    if group.world:
        return _table("simulated", f"Memory of rank 0 of {group.world}", SIMULATED, group.rows)
    return _table("ranking", "Ranking", _columns(group), group.rows)


def _columns(group: Group) -> list[Column]:
    """Return the ranking's columns; rows of another number of processes have a note."""
    columns = [detail(c) if c is PEAK and group.meter == "cuda" else c for c in RANKING]
    if len({row.spec.processes for row in group.rows}) == 1:
        return columns
    usual = group.reference.spec.processes

    def noted(row: Row) -> str:
        count = row.spec.processes
        own = [] if count == usual else [f"{count} process{'es' * (count > 1)}"]
        return ", ".join([*own, *filter(None, [flags(row)])])

    counts = Column("Processes", lambda r: r.spec.processes, "count", detail=True)
    return [*columns[:2], counts, *columns[2:-1], dataclasses.replace(columns[-1], take=noted)]


def others(groups: Sequence[Group], first: int) -> Grid:
    """Return the rows of the groups from index ``first``, each with its own reference."""
    rows = [
        (row, index + 1, group.unlike if row is group.rows[0] else "")
        for index, group in enumerate(groups)
        for row in group.rows
        if index >= first
    ]
    columns = [Column("Group", lambda entry: entry[1], "count")]
    columns += [_of_entry(column) for column in RANKING]
    columns += [Column("Differs from group 1 in", lambda entry: entry[2])]
    marks = [_marks(row) for row, _, _ in rows]
    return tabulate("others", "Other groups", columns, rows, marks=marks, note=NOTES["ranking"])


def _of_entry(column: Column) -> Column:
    """Adapt a column of the ranking to all rows; a simulated row has no times to show."""
    simulated = {c.head: c.take for c in SIMULATED}.get(column.head, lambda row: None)

    def take(entry: tuple[Row, int, str]) -> Any:
        return simulated(entry[0]) if entry[0].spec.world else column.take(entry[0])

    return dataclasses.replace(column, take=take)


def group_grids(group: Group) -> dict[str, Grid]:
    """Return every table of one group, by key."""
    rows = group.rows
    compared = [] if group.world else rows
    trained = [] if group.draws else compared
    traced = [row for row in rows if row.numbers.parameters_bytes is not None]
    siblings = [row for row in trained if row.versus.sibling]
    predicted = [row for row in rows if row.predicted]
    parts = [(row, category) for row in predicted for category in row.predicted.categories]
    drawing = ("drawing_phases", DRAWING_PHASES) if group.draws else ("phases", PHASES)
    meter = "Live tensors" if group.meter == "cuda" else "Resident mark"
    by_calibration = "Time, predicted by this device's calibration"
    grids = [
        dataclasses.replace(ranking(group), key="ranking"),
        _table(
            "effects", "Effect of each part", EFFECTS, effects.effects(group) if compared else []
        ),
        _table(drawing[0], f"{meter} of each phase", drawing[1], rows),
        _table("split", "Memory at the peak", SPLIT, traced),
        _table("host", "Memory on the host", HOST_SPLIT, [r for r in rows if fullest_host(r)]),
        _table("memory", "Memory, all counts", MEMORY, rows),
        _table("time", "Time", TIME, rows),
        _table("types", "Precision", TYPES, [r for r in rows if derive.types(r.first.evidence)]),
        _table("parity", "Same computation?", PARITY, trained),
        _table("drawn", "Same samples?", DRAWN, [r for r in rows if r.drawn]),
        _table("siblings", "Rows that alter the same", SIBLINGS, siblings),
        _table("predicted", "Predicted and measured", PREDICTED, predicted),
        _table("calibrated", by_calibration, CALIBRATED, [r for r in rows if r.calibrated]),
        _table("parts", "Predicted and traced, by category", CATEGORY_ERRORS, parts),
        _table("buckets", "DeepSpeed buckets", BUCKETS, [r for r in rows if _zero_block(r)]),
        _table("gathers", "FSDP2 gathering", GATHERS, [r for r in rows if _gathering(r)]),
    ]
    return {grid.key.removeprefix("drawing_"): grid for grid in grids}


def unfinished_grid(unfinished: list[Unfinished]) -> Grid:
    """Return the planned rows without a number to rank."""
    return _table("unfinished", "Did not finish", UNFINISHED, unfinished)


def memory_only(report: Report) -> Grid:
    """Return the runs that were measured side by side, the smallest peak first."""
    rows = sorted(report.memory_only, key=lambda r: derive.peak_of(r.ranks) or 0)
    devices = " and ".join(
        dict.fromkeys(r.environment.get("device") or r.spec.device for r in rows)
    )
    return tabulate("memory_only", f"Memory only, on {devices}", MEMORY_ONLY, rows)


def averages(result: Result) -> Grid:
    """Return the operations of a recorded run's profile."""
    return tabulate("averages", "Key averages of three steps", AVERAGES, result.key_averages)


def fits(group: Group) -> list[tuple[FastestThatFits, str, str]]:
    """Return each memory size's fastest row, with its samples/s and need as text."""
    found = fastest_that_fits(group)
    rates = units.column("rate", [f.row and f.row.numbers.samples_per_second for f in found])
    needs = units.column("gib", [f.row and f.row.numbers.need_bytes for f in found])
    return list(zip(found, rates, needs, strict=True))


def _table(key: str, title: str, columns: Sequence[Column], rows: Sequence[Any]) -> Grid:
    """Return ``tabulate`` with the note of this table; ranked rows are marked."""
    marks = [_marks(row) if isinstance(row, Row) else () for row in rows]
    return tabulate(key, title, columns, rows, marks=marks, note=NOTES.get(key, ""))


def _marks(row: Row) -> tuple[str, ...]:
    """Return a row's marks, as class names of the style sheet."""
    holds = {
        "reference": row.versus.is_reference,
        "front": row.versus.front,
        "noisy": row.numbers.noisy,
        "alarm": row.versus.wrong,
    }
    return tuple(word for word, it_does in holds.items() if it_does)
