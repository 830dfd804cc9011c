"""The claims: their verdicts and numbers, recounted from the rows that each is about.

A share of the peak from which on a saving is: much or medium 25 %, a half 45 %, down to a fraction
50 %, any 5 %; a cost is one from 2 % on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from tests.recount import measures as m
from tests.recount.cells import Number, fault, gib
from tests.recount.lookup import Rows
from tests.recount.pages import Table
from tests.recount.raw import ResultSet

__all__ = ["faults"]

LARGE, MIDDLE, SMALL = 32, 16, 2
HOLDS, NOT = "holds", "does not hold"
Judged = tuple[Any, tuple[Any, ...]]
"""A verdict and the numbers beside it, both as cells."""


def pieces(*parts: Any) -> tuple[Any, ...]:
    """Cells one after the other as one."""
    flat: list[Any] = []
    for part in parts:
        flat += part if isinstance(part, tuple) else (part,)
    return tuple(flat)


def change(fraction: float) -> Any:
    if abs(fraction) < 0.005:
        return "unchanged"
    return (Number(100 * fraction, signed=True), "%")


def share(fraction: float) -> tuple[Any, ...]:
    return (Number(100 * fraction), "%")


def times(value: float) -> Number:
    return Number(value, 2)


# ---- a recipe against plain training, with a large and a small batch ----


def by_batch(rows: Rows, recipe: str, least: float, base: str = "single") -> Judged:
    saved = {b: -rows.change(recipe, base, global_batch=b) for b in (LARGE, SMALL)}
    numbers = pieces(
        *("peak ", change(-saved[LARGE]), f" at batch {LARGE}, ", change(-saved[SMALL])),
        *(f" at batch {SMALL}; speed x", times(rows.speed(recipe, base, global_batch=LARGE))),
    )
    held = [batch for batch in saved if saved[batch] >= least]
    if len(held) != 1:
        return (HOLDS if held else NOT), numbers
    return pieces("holds only when ", weights(rows, base, held[0])), numbers


def weights(rows: Rows, base: str, held: int) -> tuple[Any, ...]:
    """What activations were where a claim held, and where it did not."""
    missed = LARGE + SMALL - held
    here, there = (rows.filled(base, global_batch=batch) for batch in (held, missed))
    words = "activations are "
    if here > 0.5 >= there:
        words = "activations outweigh all else: "
    elif there > 0.5 >= here:
        words = "activations do not outweigh all else: "
    return pieces(
        words, share(here), f" of the peak (batch {held}), not ", share(there), f" ({missed})"
    )


def pure_bf16(rows: Rows) -> Judged:
    kept, numbers = by_batch(rows, "single+bf16_pure", 0.45)
    bare, others = by_batch(rows, "single+bf16_pure+ema:place=none", 0.45, "single+ema:place=none")
    average = m.category("ema")(rows.get("single+bf16_pure", global_batch=SMALL))
    numbers = pieces(
        *(numbers, "; ", gib(average), " GiB of either peak are the float32 average of the "),
        *("weights: without one ", others),
    )
    if HOLDS in (kept, bare) and kept == NOT:
        return "holds only when no float32 average of the weights is kept", numbers
    return kept, numbers


# ---- one batch ----


def accumulation(rows: Rows) -> Judged:
    cost = rows.change("single+accumulate:steps=4", "single", global_batch=LARGE)
    numbers = pieces(
        *("peak ", change(cost), " with a quarter of the micro batch, where activations were "),
        *(share(rows.filled("single", global_batch=LARGE)), " of the peak"),
    )
    return (HOLDS if -cost >= 0.05 else NOT), numbers


def some_of(effects: dict[str, float], least: float, condition: str) -> str:
    held = [kind for kind, effect in effects.items() if effect >= least]
    if len(held) == len(effects):
        return HOLDS
    return f"holds only when {condition.format(' or '.join(held))}" if held else NOT


def pruning(rows: Rows) -> Judged:
    masks, removed = (
        rows.change(f"single+{part}", "single", global_batch=LARGE)
        for part in ("prune", "prune_structured")
    )
    verdict = some_of({"masks": -masks, "parts removed": -removed}, 0.25, "it is done with {}")
    return verdict, pieces(
        "peak ", change(masks), " with masks, ", change(removed), " with parts removed"
    )


def smaller_batch(rows: Rows) -> Judged:
    large, small = (rows.step("single", global_batch=b) for b in (LARGE, SMALL))
    paces = [m.samples_per_second(rows.get("single", global_batch=b)) for b in (LARGE, SMALL)]
    numbers = pieces(
        *(f"batch {SMALL} for {LARGE}: peak ", change(small / large - 1), " (", gib(large)),
        *(" GiB to ", gib(small), " GiB), samples/s x", times(paces[1] / paces[0])),
    )
    return (HOLDS if 1 - small / large >= 0.25 else NOT), numbers


def graph_kept(rows: Rows) -> Judged:
    kept, again = (
        rows.change(recipe, "single", global_batch=LARGE)
        for recipe in ("single+backward", "single+backward:call=autograd_grad")
    )
    verdict = some_of({"retain_graph": kept, "autograd_grad": again}, 0.02, "it is {}")
    return verdict, pieces(
        "retain_graph: peak ", change(kept), ", autograd_grad: peak ", change(again)
    )


def compression(rows: Rows) -> Judged:
    saved, numbers = {}, []
    for part in ("compress:kind=fp16", "compress:kind=powersgd", "topk"):
        row = rows.get(f"ddp+{part}", global_batch=LARGE)
        facts = row.evidence[part.split(":")[0]]
        saved[part] = -rows.change(f"ddp+{part}", "ddp", global_batch=LARGE)
        wire = Number(facts["wire_bytes"] / facts["dense_bytes"])
        numbers += [", ", f"{part}: peak ", change(-saved[part]), ", on the wire x", wire]
    return some_of(saved, 0.05, "it is {}"), pieces(*numbers[1:])


def activations_fill(rows: Rows) -> Judged:
    shares = {b: rows.filled("single", global_batch=b) for b in (LARGE, MIDDLE, SMALL)}
    numbers: list[Any] = ["activations and temporaries as a share of the peak, by batch: "]
    for batch, part in shares.items():
        numbers += [share(part), f" at {batch}", ", "]
    held = [str(b) for b in shares if shares[b] > 0.5]
    missed = [str(b) for b in shares if shares[b] <= 0.5]
    verdict = HOLDS if not missed else NOT
    if held and missed:
        verdict = (
            f"holds only when the batch is large: {' or '.join(held)}, not {' or '.join(missed)}"
        )
    return verdict, pieces(*numbers[:-1])


# ---- what grows with what ----


def power(points: dict[int, float]) -> float:
    """Least squares through the logarithms."""
    xs, ys = ([math.log(v) for v in values] for values in (points, points.values()))
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    rise = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    return rise / sum((a - x) ** 2 for a in xs)


def root_of_depth(rows: Rows) -> Judged:
    root = "single+checkpoint:every=sqrt"
    plain, sqrt = (
        power({d: rows.beyond_state(r, model=f"DiT-T/4:depth={d}") for d in (4, 16, 36)})
        for r in ("single", root)
    )
    forwards = rows.get(root, model="DiT-T/4:depth=36").evidence["checkpoint"]["block_forwards"]
    numbers = pieces(
        "from 4 to 36 blocks memory beyond the state grows with depth to the power ",
        *(times(plain), " plain, ", times(sqrt), " with sqrt; ", times(forwards)),
        " forwards a block",
    )
    return (HOLDS if sqrt <= 0.7 and forwards <= 2.0 else NOT), numbers


def linear_in_tokens(rows: Rows) -> Judged:
    tokens = {256: "DiT-T/4", 1024: "DiT-T/2"}
    full, fused = (
        power({n: rows.beyond_state(r, model=model) for n, model in tokens.items()})
        for r in ("single+attend", "single")
    )
    batch = rows.get("single", model="DiT-T/2").spec["global_batch"]
    numbers = pieces(
        *("memory beyond the state grows with tokens to the power ", times(full), " with the "),
        *("full score matrix, ", times(fused), " with torch's fused kernel; "),
        *(change(rows.change("single", "single+attend", model="DiT-T/2")), " at 1024 tokens, "),
        f"all at batch {batch}",
    )
    return (HOLDS if fused <= 1.1 else NOT), numbers


def paged(rows: Rows) -> Judged:
    """Never judged without a GPU."""
    name = "single+paged_adam8bit"
    run = next(run for run in rows.results.unfinished if run.spec["recipe"] == name)
    return "not measured", (f"{name} is {run.status}: {run.data['reason']}",)


RULES: dict[str, Callable[[Rows], Judged]] = {
    "gradient checkpointing": lambda rows: by_batch(rows, "single+checkpoint", 0.25),
    "mixed precision saves much": lambda rows: by_batch(rows, "single+bf16", 0.25),
    "mixed precision halves": lambda rows: by_batch(rows, "single+bf16", 0.45),
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
    "LoRA": lambda rows: by_batch(rows, "single+lora", 0.5),
}
"""How a claim begins -> its rule."""


def faults(table: Table, results: ResultSet) -> Iterator[str]:
    """Mismatches of the table of claims."""
    rows = Rows(results)
    for number, line in enumerate(table.lines, 1):
        claim = dict(zip(table.heads, line, strict=True))
        if claim["#"] != str(number):
            yield f"claim {number} has the number {claim['#']}"
        rule = next((r for n, r in RULES.items() if claim["Claim"].startswith(n)), None)
        if rule is None:
            yield f"no rule here for the claim {claim['Claim']!r}"
            continue
        verdict, numbers = rule(rows)
        for head, cell in (("Verdict", verdict), ("Measured", numbers)):
            wrong = fault(claim[head], cell)
            if wrong:
                yield f"claim {claim['#']}, {head}: {wrong}"
    if len(table.lines) != len(RULES):
        yield f"{len(table.lines)} claims, {len(RULES)} rules here"
