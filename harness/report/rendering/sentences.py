"""Sentences about a report and its groups, equal in every format."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from harness.report.data import lookup
from harness.report.data.answers import MANY
from harness.report.data.rows import Group, Report, Row, label
from harness.report.figures import derive
from harness.report.figures.predicted import OUT_OF_MEMORY
from harness.result import Status, is_unplaced
from harness.spec import Spec

FEW = 12
"""Most names in a sentence that every format begins with."""


def summary(report: Report) -> str:
    """Return the number of rows by status."""
    measured = sum(len(group.rows) for group in report.groups)
    labels: dict[str, list[str]] = {}
    for unfinished in report.unfinished:
        labels.setdefault(unfinished.status.value, []).append(unfinished.label)
    recorded = [label(result.spec) for result in report.recorded if result.status is Status.OK]
    if recorded:
        labels["recorded"] = recorded
    if not measured and not labels:
        return "No run finished: the result set is empty."
    counts = [f"{len(names)} {word} ({some(names, most=FEW)})" for word, names in labels.items()]
    if measured:
        text = f"{', '.join([f'{measured} measured', *counts])}."
        told = list(dict.fromkeys(filter(None, map(stand_in, report.groups))))
        return " ".join([text, *first_of(told, "groups with another reference")])
    start = "Nothing to rank" if recorded else "No run finished"
    return f"{start}: {', '.join(counts)}."


def some(names: Sequence[str], between: str = ", ", most: int = MANY) -> str:
    """Return all names; above ``most``, the first three."""
    if len(names) <= most:
        return between.join(names)
    return f"{between.join(names[:3])} and {len(names) - 3} more"


def first_of(lines: Sequence[str], what: str) -> list[str]:
    """Return all lines; above ``MANY``, the first ones and the number of further ``what``."""
    if len(lines) <= MANY:
        return list(lines)
    return [*lines[:MANY], f"{len(lines) - MANY} more {what}, which are not listed here."]


def left_out(shown: int, rows: int) -> str:
    """Return a sentence on unfinished rows that a page does not list; empty if it lists all."""
    if shown == rows:
        return ""
    return f"The first {shown} of {rows} are listed; report.json has every row."


def others(report: Report, first: int) -> str:
    """Return a sentence on the groups from index ``first``, which are not shown in full.

    Empty if there are none.
    """
    rows = [row for group in report.groups[first:] for row in group.rows]
    if not rows:
        return ""
    text = (
        f"{first} of {len(report.groups)} groups are shown in full. The other groups have "
        f"{len(rows)} rows, which are in report.csv and report.json."
    )
    wrong = [f"{row.label} ({row.versus.parity})" for row in others_wrong(report, first)]
    return " ".join([text, *_named(wrong, "Rows with a wrong computation:", ".")])


def others_wrong(report: Report, first: int) -> list[Row]:
    """Return the rows of the groups from index ``first`` with a wrong computation."""
    return [row for group in report.groups[first:] for row in group.rows if row.versus.wrong]


def recorded(report: Report) -> str:
    """Return a sentence on the recorded runs; empty without one."""
    names = some([label(result.spec) for result in report.recorded])
    return f"Recorded, not ranked: {names}." if names else ""


# ---- group ----


def detailed(group: Group, shown: Group) -> str:
    """Return a sentence on the rows in charts and tables below the ranking; empty if all are."""
    if len(shown.rows) == len(group.rows):
        return ""
    return (
        f"Charts, commands and detailed tables show {len(shown.rows)} of {len(group.rows)} rows: "
        "the reference, the Pareto front, the fastest row for each size of memory, and the "
        "fastest of the others. report.csv and report.json have every row."
    )


def setting(group: Group) -> str:
    """Return the setting that all rows of a group share."""
    spec, first = group.reference.spec, group.reference.first
    model, parameters = model_in_words(spec), f"{first.parameters / 1e6:.1f} M parameters"
    if not group.draws:
        return (
            f"{model} ({parameters}) on {spec.data}, {spec.objective} objective, global batch "
            f"{spec.global_batch}, seed {spec.seed}, {spec.warmup} warm-up + {spec.steps} timed "
            "steps"
        )
    weights = f"weights of {spec.weights}" if spec.weights else "weights as they are drawn"
    guidance = f"guidance {spec.scale:g}" if spec.scale != 1 else "no guidance"
    return (
        f"Samples of {model} ({parameters}, {weights}) in the shape of {spec.data}: "
        f"{spec.objective} objective, {spec.drawn_steps} sampler steps, {guidance}, "
        f"{spec.global_batch} samples a batch, seed {spec.seed}, {spec.warmup} warm-up + "
        f"{spec.steps} timed batches"
    )


def model_in_words(spec: Spec) -> str:
    """Return the model with its changed sizes, and the pixels, frames and text tokens of the spec.

    Sizes that the spec leaves out are the model's usual ones.
    """
    told = [
        f"{spec.resolution} pixels" if spec.resolution else "",
        f"{spec.frames} frames" if spec.frames else "",
        f"{spec.text} tokens of text" if spec.text else "",
    ]
    changed = f" with {spec.set}" if spec.set else ""
    size = ", ".join(filter(None, told))
    return f"{spec.model}{changed}" + (f" at {size}" if size else "")


def stamp(group: Group) -> str:
    """Return the meter of these numbers, and what they are not comparable with."""
    return " ".join(filter(None, (_meter(group), _nodes(group))))


def _meter(group: Group) -> str:
    counts = sorted({row.spec.processes for row in group.rows})
    noun = "process" if counts == [1] else "processes"
    where = f"{group.device}, {' or '.join(map(str, counts))} {noun}"
    if group.meter == "cuda":
        return (
            f"Measured on {where}. Memory is ranked by the free memory that a device must "
            "have: the caching allocator's reserve, the CUDA context and the "
            "communication library."
        )
    return (
        f"Measured on CPU processes ({where}), without a GPU. Do NOT compare these numbers with a "
        f"GPU's. Rows are ranked by Peak: the live tensors of a traced step "
        "on the device. Tensors that the engine offloads to host memory are in On host."
    )


def _nodes(group: Group) -> str:
    """Return the number of nodes of a group's rows; empty if all ran on one node."""
    results = [r for row in group.rows for r in row.results if r.spec.nodes > 1]
    if not results:
        return ""
    counts = " or ".join(str(n) for n in sorted({r.spec.nodes for r in results}))
    single = any(row.spec.nodes == 1 for row in group.rows)
    some_on_one = " (rows of one process on one)" if single else ""
    return f"On {counts} nodes{some_on_one}. Host memory is node 0's."


def errors(group: Group) -> list[str]:
    """Return what a reader of this group must not miss, one sentence each."""
    return [stand_in(group)] * bool(group.asked) + wrong_rows(group)


def wrong_rows(group: Group) -> list[str]:
    """Return a sentence on the rows with a wrong computation, if there are any."""
    wrong = [
        f"{row.label} ({': '.join(filter(None, (row.versus.parity, row.versus.differs_in)))})"
        for row in group.rows
        if row.versus.wrong
    ]
    after = ". They are in no answer and not on the front."
    return _named(wrong, "Rows with a wrong computation:", after, "; ")


def _named(names: Sequence[str], before: str, after: str, between: str = ", ") -> list[str]:
    """Return a sentence on these rows; none without a row."""
    return [f"{before} {some(names, between)}{after}"] if names else []


def notes(group: Group) -> list[str]:
    """Return the other warnings for a reader of this group, one sentence each."""
    rows, numbers = group.rows, [(row.label, row.numbers) for row in group.rows]
    texts = []
    if group.reference.versus.differs_in:
        texts.append(
            f"{group.reference.label} computed something else when it was measured again "
            f"({group.reference.versus.differs_in}), so the distances of other rows to it "
            "are less certain."
        )
    noisy = [name for name, n in numbers if n.noisy]
    texts += _named(noisy, "Noisy step times:", ". More --steps, or a quieter machine.")
    texts += _named(
        [f"{name} {n.disturbed_steps} of {n.timed_steps}" for name, n in numbers
         if n.disturbed_steps],
        "Disturbed steps, during which other work held the cores:",
        ". Their times are too long: measure again on a quieter machine.",
    )  # fmt: skip
    paused = [(row, sum(map(derive.paused_steps, row.results))) for row in rows]
    texts += _named(
        [f"{row.label} {count} of {row.numbers.timed_steps}" for row, count in paused if count],
        "Network paused? Steps far above the median:",
        ". Check the link between the nodes, and measure again.",
    )
    beside = [row.label for row in rows if any(r.launch and r.launch.others for r in row.results)]
    texts += _named(
        beside,
        "Another Headroom ran on the machine during",
        ", so their times are too long. Measure again with one at a time.",
    )
    texts += _hindered(group)
    if len({row.spec.processes for row in rows}) > 1:
        texts.append("Rows differ in their number of processes; samples/s is of the whole job.")
    for name, values in lookup.differing_environment(rows).items():
        texts.append(f"Rows differ in their environment: {name} is {lookup.listed(values)}.")
    unplaced = [
        f"Placement of {name}'s tensors: {n.placed_by}. All count as on the device."
        for name, n in numbers
        if is_unplaced(n.placed_by)
    ]
    texts += first_of(unplaced, "rows with unknown placement")
    texts += _missing_flops(group)
    return [*texts, *first_of(_meter_notes(group), "notes of the meter")]


def _hindered(group: Group) -> list[str]:
    found = {
        row.label: dict.fromkeys(
            w for r in row.results for w in (*derive.hindered(r.gpu_samples), *derive.spilled(r))
        )
        for row in group.rows
    }
    lines = [f"{name}: {', '.join(words)}." for name, words in found.items() if words]
    return first_of(lines, "such rows")


def _missing_flops(group: Group) -> list[str]:
    """Return the rows without FLOP/s, and why a GPU's rows have no MFU."""
    uncounted = [row.label for row in group.rows if row.numbers.flops_per_second is None]
    counted = [r.numbers for r in group.rows if r.numbers.flops_per_second is not None]
    reasons = dict.fromkeys(n.mfu_missing for n in counted if n.mfu_missing)
    texts = [f"No MFU: {reason}." for reason in reasons if group.meter == "cuda"]
    return texts + _named(uncounted, "No FLOP/s:", f". {derive.NO_FLOPS}.")


def _meter_notes(group: Group) -> list[str]:
    """Return the meter's notes; those that differ only in their file, "X.yaml: ...", are one."""
    files: dict[str, list[str]] = {}
    for note in dict.fromkeys(n for row in group.rows for r in row.results for n in r.meter_notes):
        name, colon, rest = note.partition(": ")
        named = colon and name.endswith((".yaml", ".json"))
        files.setdefault(rest if named else note, []).extend([name] if named else [])
    return [f"{', '.join(names)}: {t}." if names else f"{t}." for t, names in files.items()]


def stand_in(group: Group) -> str:
    """Return a warning if another row replaces the requested reference; empty if not."""
    if not group.asked:
        return ""
    ended = f"ended as {group.asked_ended}" if group.asked_ended else "is not among the results"
    return (
        f"NOT the requested reference: {group.asked} {ended}, so rows are compared with "
        f"{group.reference.label}; every ratio and distance is to that."
    )


# ---- prediction errors ----


def calibration(group: Group) -> str:
    """Return the calibration of the predicted times, and their errors; empty without one."""
    rows = [row.calibrated for row in group.rows if row.calibrated]
    if not rows:
        return ""
    errors = _spread("Times", [row.error for row in rows])
    return f"{rows[0].words}{f' {errors}.' if errors else ''}"


def prediction_errors(group: Group) -> str:
    """Return the errors of a group's predictions; empty without predictions."""
    rows = [row.predicted for row in group.rows if row.predicted]
    meter = "the allocator's highest" if group.meter == "cuda" else "the resident mark"
    texts = [
        _spread(
            "tensors of a step, against the run's own trace, which is not an independent measure",
            [r.step_error for r in rows],
        ),
        _category_errors(group),
        _spread("tensors kept in host memory", [r.hosted_error for r in rows]),
        _spread(f"whole run, against {meter}, an independent measure", [r.run_error for r in rows]),
        _spread("reserved", [r.reserved_error for r in rows]),
    ]
    none = [row.label for row in group.rows if row.predicted and row.predicted.method == "none"]
    texts += [f"not predicted: {some(none)}"] if none else []
    known = "; ".join(text for text in texts if text)
    return f"Predicted without running: {known}." if known else ""


def _category_errors(group: Group) -> str:
    """Return the errors of all categories of all rows, and the place of the largest."""
    pairs = [
        (category, row)
        for row in group.rows
        if row.predicted
        for category in row.predicted.categories
    ]
    worst, row = max(pairs, key=lambda pair: abs(pair[0].error), default=(None, None))
    if worst is None:
        return ""
    where = f"{worst.title} of {row.label}; {len(pairs)} values"
    name = "its categories above 5 % of the peak"
    return _spread(name, [category.error for category, _ in pairs], where)


def _spread(name: str, errors: Sequence[float | None], where: str = "") -> str:
    """Return the median and the largest of the absolute errors."""
    known = [abs(error) for error in errors if error is not None]
    if not known:
        return ""
    middle, worst = 100 * statistics.median(known), 100 * max(known)
    counted = where or f"{len(known)} rows"
    return f"{name}: median error {middle:.2f} %, largest {worst:.2f} % ({counted})"


def predicted_fits(report: Report) -> str:
    """Return the counts of rows predicted not to fit; empty if no such row was predicted.

    They are of the rows that ran out of memory, and of those that finished.
    """
    out = [unfinished for unfinished in report.unfinished if unfinished.status in OUT_OF_MEMORY]
    known = [unfinished for unfinished in out if unfinished.predicted_fit]
    finished = [row for group in report.groups for row in group.rows if row.predicted_fit]
    feared = [row.label for row in finished if not row.predicted_fit.fits]
    if not known and not feared:
        return ""
    missed = [unfinished.label for unfinished in known if unfinished.predicted_fit.fits]
    unknown = [unfinished.label for unfinished in out if not unfinished.predicted_fit]
    notes = [f"predicted to fit: {some(missed)}"] if missed else []
    notes += [f"not predicted: {some(unknown)}"] if unknown else []
    foreseen = f"{len(known) - len(missed)} of {len(out)} rows that ran out of memory"
    wrong = f"{len(feared)} of {len(finished)} rows that finished"
    names = [some(feared, "; ")] if feared else []
    return f"Predicted not to fit: {foreseen}{_noted(notes)}, {wrong}{_noted(names)}."


def _noted(notes: Sequence[str]) -> str:
    return f" ({'; '.join(notes)})" if notes else ""
