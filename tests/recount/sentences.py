"""The sentences of a group and of a report: the noise floor, warnings, the stamp, what was set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.recount import measures as m
from tests.recount import noise
from tests.recount import predicted as p
from tests.recount import versus as v
from tests.recount import words as w
from tests.recount.cells import Number, fault
from tests.recount.raw import NOT_WORK, Group, ResultSet, Row, Run

__all__ = ["FLOOR", "floor_words", "group_faults", "set_facts", "summary", "unlike", "warnings"]

FLOOR = "Noise floor "
UNKNOWN = (
    "Noise floor unknown: no row was measured twice, so that a small difference of speed may be "
    "none (--noise-floor 3 measures the reference three times)."
)
ADVICE = " A quieter machine, more --steps or a higher --noise-floor make it smaller."
UNCOUNTED = "FLOPs are not counted where weights are frozen, added, removed or packed sparse"
OLDER = "wherever they are kept (an older result: offload cannot show a saving in it)"


# ---- the noise floor ----


def floor_words(group: Group) -> tuple[Any, ...] | None:
    """As cells; nothing where no speeds are compared."""
    if group.world or len(group.rows) < 2:
        return None
    floor, size = noise.floor_of(group), noise.fraction(group)
    if floor is None or size is None:
        return (UNKNOWN,)
    shown = (Number(100 * size, 1), " %") if size <= 10 else ("above 1000 %",)
    first, *others = floor.again
    medians: list[Any] = []
    for seconds in noise.medians(first):
        medians += [", " * bool(medians), Number(1e3 * seconds)]
    more = f", and {len(others)} more row{'s' * (len(others) > 1)} more than once" * bool(others)
    times = f"{first.label} was measured {len(first.runs)} times ("
    head, end = ": ", ". Rows closer than that are not told apart: 'none seen' stands for their "
    end += "difference."
    if floor.lender:
        spec = floor.lender.reference.spec
        where = f"{spec['model']} at batch {spec['global_batch']}"
        head = f", borrowed: no row of this group was measured twice, but of {where} "
        end = ". Its own may be larger."
    return (FLOOR, *shown, head, times, *medians, f" ms){more}{end}", ADVICE * (size >= 0.2))


# ---- warnings ----


def warnings(group: Group) -> list[str]:
    """In order; of why there is no MFU the beginning alone."""
    rows = v.ranked(group)
    wrong = [f"{r.label} ({': '.join(filter(None, v.judged(r)))})" for r in rows if v.wrong(r)]
    noisy = [row.label for row in rows if m.noisy(row)]
    marked = [f"{row.label} {w.disturbed(row)}" for row in rows if m.disturbed_steps(row)]
    launches = {row.label: [run.data["launch"] or {} for run in row.runs] for row in rows}
    beside = [n for n, seen in launches.items() if any(one.get("others") for one in seen)]
    again = v.differs_in(group.reference)
    ended = group.stands_in
    how = f"ended as {ended}" if ended else "is not among the results"
    texts = {
        f"NOT the reference that was asked for: {group.wanted} {how}, so rows are compared with "
        f"{group.reference.label}; every ratio and distance is to that.": ended is not None,
        f"Computed something else than promised: {'; '.join(wrong)}. Left out of the answers and "
        "of the front.": wrong,
        f"{group.reference.label} did not compute the same when it was measured again ({again}): "
        "the other rows' distances to it say less.": again,
        f"Noisy step times: {', '.join(noisy)}. More --steps, or a quieter machine.": noisy,
        f"Disturbed steps, in which the machine was elsewhere: {', '.join(marked)}. Their times "
        "are too long: measure again on a quieter machine.": marked,
        f"Another Headroom was at work on the machine during {', '.join(beside)}: their times say "
        "little. Measure again with one at a time.": beside,
        **{f"{row.label}: {', '.join(held_back(row))}.": held_back(row) for row in rows},
        "Rows differ in their number of processes; samples/s is of the whole job.": len(
            {row.spec["processes"] for row in rows}
        )
        > 1,
    }
    return [text for text, it_is in texts.items() if it_is] + machine_warnings(rows, group)


def machine_warnings(rows: list[Row], group: Group) -> list[str]:
    texts = [f"Rows were not all measured alike: {n} is {s}." for n, s in unlike_facts(rows)]
    for row in rows:
        if (m.placed_by(row) or "").startswith("unknown"):
            texts.append(f"Places of {row.label}: {m.placed_by(row)}; all of its tensors count as "
                         "on the device.")  # fmt: skip
    bare = [row.label for row in rows if m.flops_per_second(row) is None]
    without = [r for r in rows if r.label not in bare and m.mfu_fraction(r) is None]
    texts += ["No MFU: "] if group.gpu and without else []
    texts += [f"No FLOP/s: {', '.join(bare)}. {UNCOUNTED}."] if bare else []
    notes = dict.fromkeys(n for row in rows for run in row.runs for n in run.data["meter_notes"])
    return [*texts, *(f"Meter: {note}." for note in notes)]


def held_back(row: Row) -> list[str]:
    """What nvidia-smi saw in the way of a row's GPUs."""
    found: dict[str, None] = {}
    for run in row.runs:
        found |= dict.fromkeys(in_the_way(run.data.get("gpu_samples") or []))
    return list(found)


def in_the_way(samples: list[dict[str, Any]]) -> Iterator[str]:
    pairs = {(s["index"], reason) for s in samples for reason in s["held_back_by"]}
    yield from (f"GPU {index} held back by {reason}" for index, reason in sorted(pairs))
    indices = sorted({s["index"] for s in samples})
    for index in indices:
        most = max(s["processes"] for s in samples if s["index"] == index)
        if most > 1:
            yield f"GPU {index} shared by {most} processes"
    for index in indices:
        clock = {s["when"]: s["sm_clock_hz"] for s in samples if s["index"] == index}
        before, after = clock.get("before"), clock.get("after")
        if before and after and after < 0.95 * before:
            yield f"GPU {index} clock {before / 1e6:.0f} -> {after / 1e6:.0f} MHz"


def unlike_facts(rows: list[Row]) -> Iterator[tuple[str, str]]:
    """Facts of the environment in which rows do not agree."""
    values: dict[str, dict[str, None]] = {}
    for row in rows:
        for run in row.runs:
            for name, text in flat(run.data["environment"], ""):
                values.setdefault(name, {})[text] = None
    for name, texts in values.items():
        if len(texts) > 1 and name != "changed_files":
            yield name, " / ".join(texts)


def flat(facts: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        elif name.endswith("_bytes") and isinstance(value, int | float):
            gib = value / 2**30
            yield prefix + name, f"{gib:.{3 if gib < 1 else 2}f} GiB"
        else:
            yield prefix + name, "-" if value is None else str(value)


def unlike(group: Group) -> str:
    """In what a group's work differs from the first group's."""
    ours, theirs = (work(g.reference.runs[0]) for g in (group, group.of.ordered[0]))
    changed = (name for name in ours if ours[name] != theirs.get(name))
    return ", ".join(f"{name} {ours[name]} (not {theirs.get(name)})" for name in changed)


def work(run: Run) -> dict[str, Any]:
    """What rows that are compared share, by name."""
    code = str(run.data["environment"].get("code", ""))
    spec = {name: run.spec[name] for name in sorted(run.spec) if name not in NOT_WORK}
    return spec | {"meter": run.data["meter"], "device name": run.device, "code": code}


# ---- all that a report says of a group ----


def stamp_faults(texts: list[str], group: Group) -> Iterator[str]:
    """On what it was measured; and, without a GPU, whether places were told apart."""
    counts = sorted({row.spec["processes"] for row in group.rows})
    on = f"{' or '.join(map(str, counts))} process{'es' * (counts != [1])}"
    head = f"Measured without a GPU, on CPU processes ({group.device}, {on})."
    head = f"Measured on {group.device}, {on}; " if group.gpu else head
    text = next((text for text in texts if head in text), "")
    older = any(m.placed_by(row) == "not told apart" for row in group.rows)
    if not text:
        yield f"no sentence says {head!r}"
    elif (OLDER in text) is not older and not group.gpu:
        yield f"places were {'not ' * older}told apart: {text}"


def group_faults(texts: list[str], group: Group) -> Iterator[str]:
    """Mismatches of the sentences above a group's ranking."""
    yield from stamp_faults(texts, group)
    found, wanted = [t for t in texts if t.startswith(FLOOR)], floor_words(group)
    if len(found) != (wanted is not None):
        yield f"{len(found)} sentences on the noise floor, {int(wanted is not None)} expected"
    for text in found:
        wrong = wanted and fault(text, wanted)
        yield from [f"the noise floor: {wrong}"] if wrong else []
    apart = [t.partition(": ")[2] for t in texts if t.startswith("Not ranked with ")]
    if apart != [f"{unlike(group)}."] * bool(unlike(group)):
        yield f"not ranked with the first group for {apart}, recounted {unlike(group)!r}"
    expected = warnings(group)
    yield from (
        f"{text!r} is missing" for text in expected if not any(holds(t, text) for t in texts)
    )
    for text in texts:
        if text.startswith(WARNS) and not any(holds(text, known) for known in expected):
            yield f"{text!r} is no warning of this group"


WARNS = ("Computed something", "Noisy step", "Disturbed steps", "Rows differ", "Rows were not")
WARNS += ("NOT the reference", "Another Headroom", "Places of", "No MFU", "No FLOP/s", "Meter: ")


def holds(text: str, expected: str) -> bool:
    return text.startswith(expected) if expected.endswith(": ") else text == expected


# ---- of all groups ----


def summary(results: ResultSet) -> str:
    """How many rows ended how, by name."""
    ends: dict[str, list[str]] = {}
    for run in results.unfinished:
        ends.setdefault(run.status, []).append(w.named(run))
    recorded = [w.named(run) for run in results.runs if run.recorded and run.status == "ok"]
    ends |= {"recorded": recorded} if recorded else {}
    counts = [f"{len(names)} {word} ({', '.join(names)})" for word, names in ends.items()]
    return f"{', '.join([f'{len(results.rows)} measured', *counts])}."


def out_of_memory(results: ResultSet) -> list[Run]:
    return [run for run in results.unfinished if run.status in ("gpu_oom", "host_oom")]


def fits_words(results: ResultSet) -> str:
    """How many rows that ran out of memory were predicted to, and how many that finished; on CPUs,
    where the need is known from the raw files alone."""
    out, finished = out_of_memory(results), []
    known = [run for run in out if w.predicted_need(run)]
    for row in results.rows:
        need, have = p.least(row.runs[0], row.runs[0].prediction), p.host_memory(row.runs[0])
        finished += [(row.label, need > have)] if need and have else []
    feared = [label for label, is_feared in finished if is_feared]
    if not known and not feared:
        return ""
    missed = [w.named(run) for run in known if w.predicted_to_fit(run) == "yes"]
    notes = [f"predicted to fit: {', '.join(missed)}"] if missed else []
    bare = [w.named(run) for run in out if not w.predicted_need(run)]
    notes += [f"not predicted: {', '.join(bare)}"] if bare else []
    ends = [f" ({'; '.join(some)})" if some else "" for some in (notes, feared)]
    return (
        f"Predicted not to fit: {len(known) - len(missed)} of {len(out)} rows that ran out of "
        f"memory{ends[0]}, {len(feared)} of {len(finished)} rows that finished{ends[1]}."
    )


SETTINGS = "settings_not_effects"


def set_facts(results: ResultSet) -> list[str]:
    """Each strategy with the facts that its evidence lists as settings."""
    found: dict[str, set[str]] = {}
    for group in results.ordered:
        for row in v.ranked(group):
            for name, facts in row.evidence.items():
                if facts.get(SETTINGS):
                    found.setdefault(name, set()).update(facts[SETTINGS])
    return [f"{name}: {', '.join(sorted(facts))}" for name, facts in found.items()]
