"""Sentences about a report and its groups, equal in every format."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from harness.report.data import lookup
from harness.report.data.rows import Group, Report, Row, label
from harness.report.figures import derive
from harness.result import Status, is_unplaced

FEW = 12
"""Most names in a sentence that every format begins with."""
MANY, GROUPS = 100, 12
"""Most rows of a group in detail, or lines of a list; and most groups. report.json has all."""


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
        replaced = list(dict.fromkeys(filter(None, map(stand_in, report.groups))))
        return " ".join([text, *replaced[:FEW]])
    start = "Nothing to rank" if recorded else "No run finished"
    return f"{start}: {', '.join(counts)}."


def some(names: Sequence[str], between: str = ", ", most: int = MANY) -> str:
    """Return all names; above ``most``, the first three."""
    if len(names) <= most:
        return between.join(names)
    return f"{between.join(names[:3])} and {len(names) - 3} more"


def first_of(lines: Sequence[str], what: str) -> list[str]:
    """Return all lines; above ``MANY``, the first ones and the number of further ``what``."""
    more = [f"{len(lines) - MANY} more {what}: report.json lists them."]
    return [*lines[:MANY], *(more if len(lines) > MANY else [])]


def left_out(report: Report) -> str:
    """Return a sentence on what a page does not show; empty if it shows all."""
    rest = report.groups[GROUPS:]
    wrong = [row.label for group in rest for row in group.rows if row.versus.wrong]
    cuts = [
        f"{len(rest)} of {len(report.groups)} groups" * bool(rest),
        "charts, detailed tables and commands of all but the fastest "
        f"{MANY} rows of a group" * any(len(g.rows) > MANY for g in report.groups),
        f"{len(report.unfinished) - MANY} unfinished rows" * (len(report.unfinished) > MANY),
    ]
    shown = "; ".join(filter(None, cuts))
    sentences = [f"Not on this page: {shown}. report.json has every row."] if shown else []
    return " ".join([*sentences, *_named(wrong, "Rows with a wrong computation there:", ".")])


# ---- group ----


def setting(group: Group) -> str:
    """Return the setting that all rows of a group share.

    Sizes that the spec leaves out are the model's usual ones.
    """
    spec, first = group.reference.spec, group.reference.first
    sizes = {"pixels": spec.resolution, "frames": spec.frames, "tokens of text": spec.text}
    size = ", ".join(f"{count} {words}" for words, count in sizes.items() if count)
    model = spec.model + (f" with {spec.set}" if spec.set else "") + (f" at {size}" if size else "")
    parameters = f"{first.parameters / 1e6:.1f} M parameters"
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


def stamp(group: Group) -> str:
    """Return the meter of these numbers, and what they are not comparable with."""
    counts = sorted({row.spec.processes for row in group.rows})
    noun = "process" if counts == [1] else "processes"
    where = f"{group.device}, {' or '.join(map(str, counts))} {noun}"
    if group.meter == "cuda":
        text = (
            f"Measured on {where}. Memory is compared by what a device must have free: the "
            "caching allocator's reserve, the CUDA context and the communication library."
        )
    else:
        text = (
            f"Measured on CPU processes ({where}), without a GPU. Do NOT compare these numbers "
            "with a GPU's. Memory is compared by Peak: the live tensors of a traced step "
            "on the device. Tensors that the engine offloads to host memory are in On host."
        )
    nodes = sorted({r.spec.nodes for row in group.rows for r in row.results if r.spec.nodes > 1})
    if not nodes:
        return text
    single = any(row.spec.nodes == 1 for row in group.rows)
    some_on_one = " (rows of one process on one)" if single else ""
    return f"{text} On {' or '.join(map(str, nodes))} nodes{some_on_one}. Host memory is node 0's."


def stand_in(group: Group) -> str:
    """Return a warning if another row replaces the requested reference; empty if not."""
    if not group.asked:
        return ""
    ended = f"ended as {group.asked_ended}" if group.asked_ended else "is not among the results"
    return (
        f"NOT the requested reference: {group.asked} {ended}, so rows are compared with "
        f"{group.reference.label}; every ratio and distance is to that."
    )


def errors(group: Group) -> list[str]:
    """Return what a reader of this group must not miss, one sentence each."""
    wrong = [
        f"{row.label} ({': '.join(filter(None, (row.versus.parity, row.versus.differs_in)))})"
        for row in group.rows
        if row.versus.wrong
    ]
    after = ". They are in no answer and not on the front."
    sentences = _named(wrong, "Rows with a wrong computation:", after, "; ")
    return [*filter(None, [stand_in(group)]), *sentences]


def _named(names: Sequence[str], before: str, after: str, between: str = ", ") -> list[str]:
    """Return a sentence on these rows; none without a row."""
    return [f"{before} {some(names, between)}{after}"] if names else []


def notes(group: Group) -> list[str]:
    """Return the other warnings for a reader of this group, one sentence each."""
    rows, texts, again = group.rows, [], group.reference.versus.differs_in
    if again:
        texts.append(
            f"{group.reference.label} computed something else when it was measured again "
            f"({again}), so the distances of other rows to it are less certain."
        )
    noisy = [row.label for row in rows if row.numbers.noisy]
    texts += _named(noisy, "Noisy step times:", ". More --steps, or a quieter machine.")
    disturbed = _counted(rows, [row.numbers.disturbed_steps for row in rows])
    which = "Disturbed steps, during which other work held the cores:"
    after = ". Their times are too long: measure again on a quieter machine."
    texts += _named(disturbed, which, after)
    paused = _counted(rows, [sum(map(derive.paused_steps, row.results)) for row in rows])
    which = "Network paused? Steps far above the median:"
    texts += _named(paused, which, ". Check the link between the nodes, and measure again.")
    others = [r.label for r in rows if any(one.launch and one.launch.others for one in r.results)]
    after = ", so their times are too long. Measure again with one at a time."
    texts += _named(others, "Another Headroom ran on the machine during", after)
    for row in rows:
        hindered = (derive.hindered(r.gpu_samples) + derive.spilled(r) for r in row.results)
        words = dict.fromkeys(word for found in hindered for word in found)
        texts += [f"{row.label}: {', '.join(words)}."] if words else []
    if len({row.spec.processes for row in rows}) > 1:
        texts.append("Rows differ in their number of processes; samples/s is of the whole job.")
    for name, values in lookup.environment(rows).items():
        if len(values) > 1 and name not in lookup.IGNORED:
            texts.append(f"Rows differ in their environment: {name} is {lookup.listed(values)}.")
    texts += [
        f"Placement of {row.label}'s tensors: {row.numbers.placed_by}. All count as on the device."
        for row in rows
        if is_unplaced(row.numbers.placed_by)
    ]
    missing = dict.fromkeys(r.numbers.mfu_missing for r in rows if r.numbers.flops_per_second)
    texts += [f"No MFU: {why}." for why in missing if why and group.meter == "cuda"]
    uncounted = [row.label for row in rows if row.numbers.flops_per_second is None]
    texts += _named(uncounted, "No FLOP/s:", f". {derive.NO_FLOPS}.")
    return first_of([*texts, *_meter_notes(rows)], "notes")


def _counted(rows: Sequence[Row], counts: Sequence[int | None]) -> list[str]:
    """Return "label 2 of 8" for each row with such steps."""
    pairs = zip(rows, counts, strict=True)
    return [f"{row.label} {count} of {row.numbers.timed_steps}" for row, count in pairs if count]


def _meter_notes(rows: Sequence[Row]) -> list[str]:
    """Return the meter's notes; those that differ only in their file, "X.yaml: ...", are one."""
    files: dict[str, list[str]] = {}
    for note in dict.fromkeys(n for row in rows for r in row.results for n in r.meter_notes):
        name, colon, rest = note.partition(": ")
        named = colon and name.endswith((".yaml", ".json"))
        files.setdefault(rest if named else note, []).extend([name] if named else [])
    return [f"{', '.join(names)}: {t}." if names else f"{t}." for t, names in files.items()]


# ---- errors of predictions ----


def prediction_errors(group: Group) -> str:
    """Return the errors of a group's predictions, and the calibration's words; empty without."""
    rows = [row.predicted.memory for row in group.rows if row.predicted.memory]
    times = [row.predicted.times for row in group.rows if row.predicted.times]
    meter = "the allocator's highest" if group.meter == "cuda" else "the resident mark"
    texts = [
        _spread(
            "tensors of a step, against the run's own trace, which is not an independent measure",
            [r.step_error for r in rows],
        ),
        _spread(f"whole run, against {meter}, an independent measure", [r.run_error for r in rows]),
        _spread("times", [time.error for time in times]),
    ]
    known = "; ".join(filter(None, texts))
    sentences = [f"Predicted without running: {known}."] if known else []
    return " ".join([*sentences, *(time.words for time in times[:1])])


def _spread(name: str, errors: Sequence[float | None]) -> str:
    """Return the median and the largest of the absolute errors."""
    known = [100 * abs(error) for error in errors if error is not None]
    if not known:
        return ""
    middle, worst = statistics.median(known), max(known)
    return f"{name}: median error {middle:.2f} %, largest {worst:.2f} % ({len(known)} rows)"
