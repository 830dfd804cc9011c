"""The rules of the claims: each a small function of measured rows that gives a ``Judgement``.

The condition of a claim that ``holds only when`` is made of what the rows measured, so that it
cannot say what their numbers deny.
"""

from __future__ import annotations

from harness.report.data import derive
from harness.report.data.lookup import Rows, state_share
from harness.report.data.units import gib
from harness.report.stories.claim_verdicts import (
    HALF,
    MUCH,
    NOTHING,
    SOME,
    Judgement,
    Verdict,
    change,
    number,
    share,
)
from harness.result import Status

__all__ = [
    "BATCHES",
    "DEEP",
    "DEPTHS",
    "LARGE",
    "SMALL",
    "TOKENS",
    "accumulation",
    "activations_fill",
    "activations_share",
    "by_batch",
    "compression",
    "graph_kept",
    "linear_in_tokens",
    "paged",
    "pruning",
    "pure_bf16",
    "root_of_depth",
    "smaller_batch",
]

BATCHES = LARGE, MIDDLE, SMALL = 32, 16, 2
"""Global batches of the rows, chosen so that in plain training activations should outweigh
weights, gradients and optimizer state at the first and not at the last; the rows say whether they
do."""
DEPTHS = (4, 16, 36)
DEEP = "DiT-T/4:depth={}"
TOKENS = {"DiT-T/8": 64, "DiT-T/4": 256, "DiT-T/2": 1024}
"""Model -> tokens of a 64 x 64 latent."""
NO_AVERAGE = "no float32 average of the weights is kept"


# ---- a recipe against plain training, with a large and a small batch ----


def by_batch(rows: Rows, recipe: str, least: float, base: str = "single") -> Judgement:
    """Whether ``recipe`` saves at least ``least`` of the peak with a large and a small batch."""
    saved = {b: rows.saved(recipe, base, global_batch=b) for b in (LARGE, SMALL)}
    peaks = ", ".join(f"{change(-s, -least)} at batch {b}" for b, s in saved.items())
    numbers = f"peak {peaks}; speed {rows.times(recipe, base, global_batch=LARGE)}"
    held = [b for b, s in saved.items() if s >= least]
    if len(held) == len(saved):
        return Judgement(Verdict.HOLDS, numbers)
    if not held:
        return Judgement(Verdict.NOT, numbers)
    return Judgement(Verdict.ONLY, numbers, weights_of(rows, base, held[0]))


def weights_of(rows: Rows, base: str, held: int) -> str:
    """The share of activations in ``base`` at the batch where a claim held, and at the one where it
    did not. That they outweigh all else is said only where it tells the two batches apart."""
    missed = SMALL if held == LARGE else LARGE
    here, there = (activations_share(rows, batch, base) for batch in (held, missed))
    shares = f"{share(here, 0.5)} of the peak (batch {held}), not {share(there, 0.5)} ({missed})"
    if here > 0.5 >= there:
        return f"activations outweigh all else: {shares}"
    if there > 0.5 >= here:
        return f"activations do not outweigh all else: {shares}"
    return f"activations are {shares}"


def activations_share(rows: Rows, batch: int, base: str = "single") -> float:
    """Activations and temporaries as a share of ``base``'s peak, as measured."""
    return 1 - state_share(rows.get(base, global_batch=batch))


def pure_bf16(rows: Rows) -> Judgement:
    """Judged with the float32 average of the weights, which no precision makes smaller, and again
    without an average on either side."""
    kept = by_batch(rows, "single+bf16_pure", HALF)
    bare = by_batch(rows, "single+bf16_pure+ema:place=none", HALF, "single+ema:place=none")
    average = rows.get("single+bf16_pure", global_batch=SMALL).numbers.ema_bytes
    numbers = (
        f"{kept.numbers}; {gib(average)} of either peak are the float32 average of the weights: "
        f"without one {bare.numbers}"
    )
    if kept.verdict is Verdict.HOLDS or bare.verdict is Verdict.NOT:
        return Judgement(kept.verdict, numbers, kept.condition)
    without = f"{NO_AVERAGE} and {bare.condition}" if bare.condition else NO_AVERAGE
    return Judgement(
        Verdict.ONLY, numbers, f"{kept.condition}, or {without}" if kept.condition else without
    )


def smaller_batch(rows: Rows) -> Judgement:
    large, small = (rows.step_bytes("single", global_batch=b) for b in (LARGE, SMALL))
    pace = [rows.get("single", global_batch=b).numbers.samples_per_second for b in (LARGE, SMALL)]
    saved = 1 - small / large
    numbers = (
        f"batch {SMALL} for {LARGE}: peak {change(-saved, -MUCH)} ({gib(large)} to {gib(small)}), "
        f"samples/s x{pace[1] / pace[0]:.2f}"
    )
    return Judgement(Verdict.HOLDS if saved >= MUCH else Verdict.NOT, numbers)


def activations_fill(rows: Rows) -> Judgement:
    shares = {b: activations_share(rows, b) for b in BATCHES}
    parts = ", ".join(f"{share(s, 0.5)} at {b}" for b, s in shares.items())
    numbers = f"activations and temporaries as a share of the peak, by batch: {parts}"
    held, missed = ([b for b in BATCHES if (shares[b] > 0.5) is over] for over in (True, False))
    if not missed:
        return Judgement(Verdict.HOLDS, numbers)
    if not held:
        return Judgement(Verdict.NOT, numbers)
    here, there = (" or ".join(map(str, batches)) for batches in (held, missed))
    return Judgement(Verdict.ONLY, numbers, f"the batch is large: {here}, not {there}")


# ---- one batch ----


def accumulation(rows: Rows) -> Judgement:
    saved = rows.saved("single+accumulate:steps=4", "single", global_batch=LARGE)
    filled = activations_share(rows, LARGE)
    numbers = (
        f"peak {change(-saved, -SOME)} with a quarter of the micro batch, where activations were "
        f"{share(filled)} of the peak"
    )
    return Judgement(Verdict.HOLDS if saved >= SOME else Verdict.NOT, numbers)


def pruning(rows: Rows) -> Judgement:
    kinds = {"masks": "single+prune", "parts removed": "single+prune_structured"}
    saved = {kind: rows.saved(r, "single", global_batch=LARGE) for kind, r in kinds.items()}
    numbers = ", ".join(f"{change(-s, -MUCH)} with {kind}" for kind, s in saved.items())
    return some_of(saved, MUCH, f"peak {numbers}", "it is done with {}")


def graph_kept(rows: Rows) -> Judgement:
    costs = {
        word: -rows.saved(f"single+backward:call={word}", "single", global_batch=LARGE)
        for word in ("retain_graph", "autograd_grad")
    }
    numbers = ", ".join(f"{word}: peak {change(cost, NOTHING)}" for word, cost in costs.items())
    return some_of(costs, NOTHING, numbers, "it is {}")


def compression(rows: Rows) -> Judgement:
    saved, words = {}, []
    for part in ("compress:kind=fp16", "compress:kind=powersgd", "topk"):
        recipe, name = f"ddp+{part}", part.partition(":")[0]
        facts = rows.get(recipe, global_batch=LARGE).first.evidence[name]
        saved[part] = rows.saved(recipe, "ddp", global_batch=LARGE)
        wire = facts["wire_bytes"] / facts["dense_bytes"]
        words.append(f"{part}: peak {change(-saved[part], -SOME)}, on the wire x{wire:.3g}")
    return some_of(saved, SOME, ", ".join(words), "it is {}")


def some_of(effects: dict[str, float], least: float, numbers: str, condition: str) -> Judgement:
    """Whether all of several kinds have at least ``least`` of an effect, none, or which."""
    held = [kind for kind, effect in effects.items() if effect >= least]
    if len(held) == len(effects):
        return Judgement(Verdict.HOLDS, numbers)
    if not held:
        return Judgement(Verdict.NOT, numbers)
    return Judgement(Verdict.ONLY, numbers, condition.format(" or ".join(held)))


# ---- what grows with what ----


def root_of_depth(rows: Rows) -> Judgement:
    powers = {r: depth_power(rows, r) for r in ("single", "single+checkpoint:every=sqrt")}
    plain, root = powers.values()
    facts = rows.get("single+checkpoint:every=sqrt", model=DEEP.format(DEPTHS[-1])).first.evidence
    forwards, most_root, most_forwards = facts["checkpoint"]["block_forwards"], 0.7, 2.0
    numbers = (
        f"from {DEPTHS[0]} to {DEPTHS[-1]} blocks memory beyond the state grows with depth to the "
        f"power {number(plain)} plain, {number(root, most_root)} with sqrt; "
        f"{number(forwards, most_forwards)} forwards a block"
    )
    kept = root <= most_root and forwards <= most_forwards
    return Judgement(Verdict.HOLDS if kept else Verdict.NOT, numbers)


def depth_power(rows: Rows, recipe: str) -> float:
    """The power of depth that a recipe's memory beyond the state grows with."""
    return derive.power(DEPTHS, [rows.beyond_state(recipe, model=DEEP.format(d)) for d in DEPTHS])


def linear_in_tokens(rows: Rows) -> Judgement:
    naive, fused = (token_power(rows, recipe) for recipe in ("single+attend", "single"))
    most, linear = max(TOKENS.values()), 1.1
    largest = {"model": max(TOKENS, key=TOKENS.__getitem__)}
    saved = rows.saved("single", "single+attend", **largest)
    numbers = (
        f"memory beyond the state grows with tokens to the power {number(naive)} with the full "
        f"score matrix, {number(fused, linear)} with torch's fused kernel; {change(-saved)} at "
        f"{most} tokens, all at batch {rows.get('single', **largest).spec.global_batch}"
    )
    return Judgement(Verdict.HOLDS if fused <= linear else Verdict.NOT, numbers)


def token_power(rows: Rows, recipe: str) -> float:
    """The power of tokens that a recipe's memory beyond the state grows with, without the first
    model: with so few tokens, what does not depend on them still shows."""
    models = list(TOKENS)[1:]
    beyond = [rows.beyond_state(recipe, model=model) for model in models]
    return derive.power([TOKENS[model] for model in models], beyond)


# ---- running out of memory ----


def paged(rows: Rows) -> Judgement:
    """Judged only where the same optimizer without pages ran out of memory.

    Peaks of the allocator would not do: bitsandbytes takes the moments from the driver
    (cudaMallocManaged), so torch never counts them, wherever their pages are.
    """
    names = plain, pages = "single+adam8bit", "single+paged_adam8bit"
    ends = {name: rows.status(name, global_batch=LARGE) for name in names}
    if ends[plain] is Status.GPU_OOM and ends[pages] in (Status.OK, Status.GPU_OOM):
        fits = ends[pages] is Status.OK
        outcome = "trained" if fits else "ran out of memory too"
        numbers = f"at batch {LARGE} {plain} ran out of memory, {pages} {outcome}"
        return Judgement(Verdict.HOLDS if fits else Verdict.NOT, numbers)
    used = [_device_bytes(rows, name) for name in reversed(names)]
    return Judgement(
        Verdict.OPEN,
        f"both fit at batch {LARGE}, so that no page had to leave the device; it had "
        f"{gib(used[0])} in use with pages, {gib(used[1])} without. ./run.sh max-batch of "
        "each tells whether pages let more fit",
    )


def _device_bytes(rows: Rows, recipe: str) -> int | None:
    """What the device itself counted as used: pages of managed memory that are on it too."""
    return rows.get(recipe, global_batch=LARGE).numbers.process_peak_bytes
