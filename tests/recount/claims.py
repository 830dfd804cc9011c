"""The claims: their verdicts and numbers, and the tables that these were taken from, recounted.

A share of the peak from which on a saving is: much or medium 25 %, a half 45 %, down to a fraction
50 %, any 5 %; a cost is one from 2 % on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.recount import measures as m
from tests.recount.cells import MIB, Number, fault, gib, percent
from tests.recount.cells import change as signed
from tests.recount.forecast import ForecastRows, at_size, place, ruled
from tests.recount.growths import GROWTHS, linear_in_tokens, power, root_of_depth, sizes
from tests.recount.lookup import Missing, Rows, state_share
from tests.recount.pages import Table
from tests.recount.raw import ResultSet
from tests.recount.sweeps import (
    BATCHES,
    HOLDS,
    NOT,
    ONLY,
    OPEN,
    Band,
    Judged,
    Sweep,
    judged,
    limit,
    points,
    said,
    share,
    swept,
    with_pace,
)

__all__ = ["faults", "foretold_faults", "growth_faults", "sweep_faults"]

MUCH, HALF, FRACTION, ANY, COST = 0.25, 0.45, 0.5, 0.05, 0.02


# ---- the rules ----


def saves(recipe: str, least: float, base: str = "single") -> Callable[[Rows], Judged]:
    return lambda rows: with_pace(rows, recipe, base, Band(least))


def size(found: int | None) -> str:
    """GiB in a sentence: two decimals from 1 on, three below; a dash where it is not known."""
    if found is None:
        return "-"
    places = 3 if found < 2**30 else 2
    return f"{found / 2**30:.{places}f} GiB"


def pure_bf16(rows: Rows) -> Judged:
    kept = saves("single+bf16_pure", HALF)(rows)
    bare = saves("single+bf16_pure+ema:place=none", HALF, "single+ema:place=none")(rows)
    average = m.category("ema")(rows.get("single+bf16_pure", global_batch=BATCHES[rows.device][-1]))
    numbers = (
        f"{kept[2]}; {size(average)} of either peak are the float32 average of the weights: "
        f"without one {bare[2]}"
    )
    if kept[0] == HOLDS or bare[0] == NOT:
        return kept[0], kept[1], numbers
    without = f"where no float32 average of the weights is kept, {bare[1]}"
    return ONLY, f"{kept[1]}, or, {without}" if kept[1] else without, numbers


def smaller_batch(rows: Rows) -> Judged:
    """Each batch against half of it."""
    plain = swept(rows, "single")
    half = Sweep(shares=plain.shares)
    for batch in plain.peaks:
        if batch / 2 in plain.peaks:
            for ours, theirs in ((half.peaks, plain.peaks), (half.beyond, plain.beyond)):
                ours[batch] = (theirs[batch / 2][1], theirs[batch][1])
    if not half.peaks:
        raise Missing("single was not measured at a batch and at half of it")
    (first, last), band = half.ends, Band(ANY)
    ends = [size(found) for found in reversed(half.peaks[last])]
    pace = rows.rates(*(rows.get("single", global_batch=b) for b in (first / 2, last)))
    numbers = (
        f"half of a batch: {said(half, band)}, from {ends[0]} to {ends[1]}; "
        f"samples/s {pace} at batch {first / 2:g}"
    )
    return judged(half, band, numbers)


def activations_fill(rows: Rows) -> Judged:
    plain = swept(rows, "single")
    each = [f"{share(part, 0.5)} at {batch}" for batch, part in plain.shares.items()]
    text = f"activations and temporaries as a share of the peak, by batch: {', '.join(each)}"
    state = Sweep(shares=plain.shares)
    for batch, (_, base) in plain.peaks.items():
        state.peaks[batch] = (base * (1 - plain.shares[batch]), base)
    return judged(state, Band(FRACTION), text)


def kinds(sweeps: dict[str, Sweep], band: Band, condition: str) -> Judged:
    """All kinds at every batch, none at any, or which where."""
    each = {kind: judged(sweep, band, said(sweep, band)) for kind, sweep in sweeps.items()}
    numbers = ". ".join(f"{kind}: {found[2]}" for kind, found in each.items())
    held = {kind: found for kind, found in each.items() if found[0] != NOT}
    if not held:
        return NOT, "", numbers
    if all(found[0] == HOLDS for found in each.values()):
        return HOLDS, next(iter(each.values()))[1], numbers
    where = [f"{condition} {kind} {found[1]}" for kind, found in held.items()]
    return ONLY, " and ".join(where), numbers


def pruning(rows: Rows) -> Judged:
    names = {"masks": "prune", "parts removed": "prune_structured"}
    sweeps = {kind: swept(rows, f"single+{part}") for kind, part in names.items()}
    return kinds(sweeps, Band(MUCH), "with")


def graph_kept(rows: Rows) -> Judged:
    calls = ("retain_graph", "autograd_grad")
    sweeps = {call: swept(rows, f"single+backward:call={call}") for call in calls}
    return kinds(sweeps, Band(most=-COST), "of")


def compression(rows: Rows) -> Judged:
    parts = ("compress:kind=fp16", "compress:kind=powersgd", "topk")
    sweeps = {part: swept(rows, f"ddp+{part}", "ddp") for part in parts}
    wires = []
    for part, sweep in sweeps.items():
        row = rows.get(f"ddp+{part}", global_batch=sweep.ends[1])
        sent = row.evidence[part.split(":")[0]]
        wires.append(f"{part} x{sent['wire_bytes'] / sent['dense_bytes']:.3g}")
    verdict, where, numbers = kinds(sweeps, Band(ANY), "of")
    return verdict, where, f"{numbers}. On the wire: {', '.join(wires)}"


def paged(rows: Rows) -> Judged:
    """Judged only where the same optimizer without pages ran out of memory."""
    ends, used, large = {}, {}, BATCHES[rows.device][-1]
    for name in ("single+adam8bit", "single+paged_adam8bit"):
        try:
            used[name] = m.highest("process")(rows.get(name, global_batch=large))
            ends[name] = "ok"
        except Missing as why:
            ends[name] = str(why)
    plain, pages = ends.values()
    out = "single+adam8bit is gpu_oom"
    if plain.startswith(out):
        words = {"ok": (HOLDS, "trained")}
        words["single+paged_adam8bit is gpu_oom"] = (NOT, "ran out of memory too")
        verdict, outcome = words.get(pages.partition(":")[0], (OPEN, ""))
        if outcome:
            text = f"at batch {large} single+adam8bit ran out of memory, single+paged_adam8bit "
            return verdict, "", text + outcome
    missing = [text for text in (pages, plain) if text != "ok"]
    if missing:
        raise Missing(missing[0])
    with_, without = map(size, reversed(used.values()))
    return OPEN, "", (
        f"both fit at batch {large}, so that no page had to leave the device; it had {with_} in "
        f"use with pages, {without} without. ./run.sh max-batch of each tells whether pages let "
        "more fit"
    )  # fmt: skip


def accumulation(rows: Rows) -> Judged:
    """Little to medium ends where a half begins."""
    return with_pace(rows, "single+accumulate:steps=4", "single", Band(ANY, HALF, below=True))


RULES: dict[str, Callable[[Rows], Judged]] = {
    "gradient checkpointing": saves("single+checkpoint", MUCH),
    "mixed precision saves much": saves("single+bf16", MUCH),
    "mixed precision halves": saves("single+bf16", HALF),
    "training in pure bf16": pure_bf16,
    "gradient accumulation": accumulation,
    "pruning": pruning,
    "smaller batches": smaller_batch,
    "torch.autograd.grad": graph_kept,
    "compressing": compression,
    "activations, not weights": activations_fill,
    "sqrt(L)": root_of_depth,
    "fused (flash) attention": linear_in_tokens,
    "paged optimizers": paged,
    "LoRA": saves("single+lora", FRACTION),
}
"""How a claim begins -> its rule."""


def faults(table: Table, results: ResultSet) -> Iterator[str]:
    """Mismatches of the table of claims."""
    rows, told = Rows(results), results.forecast
    title = f"Claims, measured on {rows.model}" + (f"; predicted for {place(told)}" if told else "")
    if table.title != title:
        yield f"{table.title!r} is not {title!r}"
    for number, line in enumerate(table.lines, 1):
        claim = dict(zip(table.heads, line, strict=True))
        if claim["#"] != str(number):
            yield f"claim {number} has the number {claim['#']}"
        rule = next((r for n, r in RULES.items() if claim["Claim"].startswith(n)), None)
        if rule is None:
            yield f"no rule here for the claim {claim['Claim']!r}"
            continue
        verdict, where, numbers = ruled(rule, rows)
        cells = {"Verdict": f"{verdict} {where}".strip(), "Measured": numbers}
        if told:
            said, figures = at_size(rule, told)
            cells |= {f"At {told['model']}": said, "Predicted there": figures}
        heads = ["#", "Claim", "Who says so", *cells]
        if table.heads != heads:
            yield f"the heads are {table.heads}, {heads} recounted"
            return
        for head, cell in cells.items():
            wrong = fault(claim[head], cell)
            if wrong:
                yield f"claim {claim['#']}, {head}: {wrong}"
    if len(table.lines) != len(RULES):
        yield f"{len(table.lines)} claims, {len(RULES)} rules here"


# ---- what the verdicts were taken from ----

WITH_PARTS = ("checkpoint", "bf16", "bf16_pure", "accumulate:steps=4", "lora", "prune")
WITH_PARTS += ("prune_structured", "backward:call=retain_graph", "backward:call=autograd_grad")
PAIRS = [(f"single+{part}", "single") for part in WITH_PARTS]
PAIRS += [("single+bf16_pure+ema:place=none", "single+ema:place=none")]
PAIRS += [(f"ddp+{part}", "ddp") for part in ("compress:kind=fp16", "compress:kind=powersgd")]
PAIRS += [("ddp+topk", "ddp")]
Lines = list[dict[str, Any]]


def sweep_lines(rows: Rows) -> Lines:
    lines, at = [], BATCHES[rows.device]
    for recipe, base in [("single", "single"), *PAIRS]:
        try:
            sweep = swept(rows, recipe, base)
        except Missing:
            continue
        if recipe == base:
            peaks = {b: (gib(found[1]), " GiB") for b, found in sweep.peaks.items()}
            parts = {b: (percent(1 - state_share(rows.get("single", global_batch=b))), " %")
                     for b in sweep.peaks}  # fmt: skip
            lines += [batch_line(at, "single", "its peak", peaks, None)]
            lines += [batch_line(at, "single", "activations in it", parts, None)]
            continue
        cells = {b: (signed(-sweep.saved(b)), " %") for b in sweep.peaks}
        found = limit(sweep)
        last = found and (signed(-found[0]), f" % ({points(found[1])})")
        lines.append(batch_line(at, recipe, base, cells, last))
    return lines


def batch_line(
    at: tuple[int, ...], recipe: str, to: str, cells: dict[float, Any], last: Any
) -> dict[str, Any]:
    by_batch = {f"batch {batch}": cells.get(batch) for batch in at}
    return {"Recipe": recipe, "to": to, **by_batch, "Limit": last}


def growth_lines(rows: Rows) -> Lines:
    lines: Lines = []
    for (recipe, of), specs in GROWTHS.items():
        try:
            found = sizes(rows, recipe, specs(rows))
        except Missing:
            continue
        mib: list[Any] = []
        least = int(max(found.values()) < 1000 * MIB)  # decimals that three digits ask for
        for x, held in found.items():
            mib += [", " * bool(mib), Number(held / MIB, least), f" at {x}"]
        line = power(found)
        ends = {"first": Number(line.first, 2), "last": Number(line.last, 2)}
        texts = {"Recipe": recipe, "Against": of, "MiB": tuple(mib), "Power": line.words()}
        lines.append(texts | ends)
    return lines


def line_faults(table: Table, lines: Lines) -> Iterator[str]:
    if len(table.lines) != len(lines):
        yield f"{len(table.lines)} lines, {len(lines)} recounted"
    for printed, line in zip(table.lines, lines, strict=False):
        if table.heads != list(line):
            yield f"the heads are {table.heads}, {list(line)} recounted"
            return
        for head, text in zip(table.heads, printed, strict=True):
            wrong = fault(text, line[head])
            if wrong:
                yield f"{printed[0]} {printed[1]}, {head}: {wrong}"


def foretold_faults(table: Table, results: ResultSet) -> Iterator[str]:
    """Mismatches of either table that the predicted verdicts were taken from."""
    if not results.forecast:
        yield "nothing was predicted"
        return
    rows, name = ForecastRows(results.forecast), f"Predicted for {results.forecast['model']}: "
    lines = {"the peak over batches": sweep_lines,
             "what memory beyond the state grows with": growth_lines}  # fmt: skip
    take = lines.get(table.title.removeprefix(name))
    if take is None:
        yield f"no rule here for {table.title!r}"
        return
    yield from line_faults(table, take(rows))


def sweep_faults(table: Table, results: ResultSet) -> Iterator[str]:
    """Mismatches of the table of peaks over batches."""
    yield from line_faults(table, sweep_lines(Rows(results)))


def growth_faults(table: Table, results: ResultSet) -> Iterator[str]:
    """Mismatches of the table of growths."""
    yield from line_faults(table, growth_lines(Rows(results)))
