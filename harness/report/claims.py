"""What posts and docs claim about saving memory, judged by measured rows.

Each claim is one small function of the rows: the numbers decide, and a row that was not measured
leaves its claim undecided with the reason. ``suites/claims.yaml`` has the rows; every claim is
about one DiT, one machine and one step, which the report names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from harness.report.lookup import Missing, Rows, state_share
from harness.report.rows import Report
from harness.report.units import gib

__all__ = ["CLAIMS", "Claim", "Finding", "Verdict", "judge"]

LARGE, SMALL = 16, 2
"""Global batches of the rows: activations outweigh the state in one, and not in the other."""
MUCH, SOME, NOTHING = 0.25, 0.05, 0.02
"""Shares of the peak: what counts as a medium saving, as any, and as none."""
DEPTHS = (4, 16, 36)
DEEP = "DiT-T/4:depth={}"
TOKENS = {"DiT-T/8": 64, "DiT-T/4": 256, "DiT-T/2": 1024}
"""Model -> tokens of a 64 x 64 latent."""


class Verdict(str, Enum):
    """What the numbers say."""

    HOLDS = "holds"
    ONLY = "holds only when"
    NOT = "does not hold"
    OPEN = "not measured"


@dataclass(frozen=True)
class Finding:
    """A verdict, the condition of ``holds only when``, and the numbers as a sentence."""

    verdict: Verdict
    numbers: str
    condition: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """``says`` is the claim in our words, ``where`` who makes it."""

    says: str
    where: str
    rule: Callable[[Rows], Finding]


def judge(report: Report) -> list[tuple[Claim, Finding]]:
    """Every claim with its finding."""
    rows = Rows(report)
    return [(claim, _found(claim, rows)) for claim in CLAIMS]


def _found(claim: Claim, rows: Rows) -> Finding:
    try:
        return claim.rule(rows)
    except Missing as missing:
        return Finding(Verdict.OPEN, str(missing))


# ---- the rules ----


def by_batch(rows: Rows, recipe: str, least: float, base: str = "single") -> Finding:
    """Whether ``recipe`` saves at least ``least`` of the peak with a large and a small batch."""
    large, small = (rows.saved(recipe, base, global_batch=b) for b in (LARGE, SMALL))
    pace = rows.speed(recipe, base, global_batch=LARGE)
    numbers = (
        f"peak {change(-large)} at batch {LARGE}, {change(-small)} at batch {SMALL}; "
        f"speed x{pace:.2f}"
    )
    if min(large, small) >= least:
        return Finding(Verdict.HOLDS, numbers)
    if max(large, small) < least:
        return Finding(Verdict.NOT, numbers)
    parts = ("activations", "weights and optimizer state")
    more, less = parts if large > small else reversed(parts)
    return Finding(Verdict.ONLY, numbers, f"{more} outweigh {less}")


def accumulation(rows: Rows) -> Finding:
    saved = rows.saved("single+accumulate:steps=4", "single", global_batch=LARGE)
    numbers = f"peak {change(-saved)} with a quarter of the micro batch"
    if saved < SOME:
        return Finding(Verdict.NOT, numbers)
    more = "; more than claimed, since activations filled the memory" if saved > 0.5 else ""
    return Finding(Verdict.HOLDS, numbers + more)


def pruning(rows: Rows) -> Finding:
    masks = rows.saved("single+prune", "single", global_batch=LARGE)
    removed = rows.saved("single+prune_structured", "single", global_batch=LARGE)
    numbers = f"peak {change(-masks)} with masks, {change(-removed)} with parts removed"
    if masks >= MUCH:
        return Finding(Verdict.HOLDS, numbers)
    if removed >= MUCH / 2:
        return Finding(Verdict.ONLY, numbers, "weights are really removed; a mask is one more copy")
    return Finding(Verdict.NOT, numbers)


def smaller_batch(rows: Rows) -> Finding:
    large, small = (rows.step_bytes("single", global_batch=b) for b in (LARGE, SMALL))
    pace = [rows.get("single", global_batch=b).numbers.samples_per_second for b in (LARGE, SMALL)]
    saved = 1 - small / large
    numbers = (
        f"batch {SMALL} for {LARGE}: peak {change(-saved)} ({gib(large)} to {gib(small)}), "
        f"samples/s x{pace[1] / pace[0]:.2f}"
    )
    return Finding(Verdict.HOLDS if saved >= MUCH else Verdict.NOT, numbers)


def graph_kept(rows: Rows) -> Finding:
    costs = {
        word: -rows.saved(f"single+backward:call={word}", "single", global_batch=LARGE)
        for word in ("retain_graph", "autograd_grad")
    }
    numbers = ", ".join(f"{word}: peak {change(cost)}" for word, cost in costs.items())
    dear = [word for word, cost in costs.items() if cost > NOTHING]
    if len(dear) == len(costs):
        return Finding(Verdict.HOLDS, numbers)
    if not dear:
        return Finding(Verdict.NOT, numbers)
    return Finding(Verdict.ONLY, numbers, f"it is {dear[0]}")


def compression(rows: Rows) -> Finding:
    saved, words = [], []
    for part in ("compress:kind=fp16", "compress:kind=powersgd", "topk"):
        recipe, name = f"ddp+{part}", part.partition(":")[0]
        facts = rows.get(recipe, global_batch=LARGE).first.evidence[name]
        saved.append(rows.saved(recipe, "ddp", global_batch=LARGE))
        wire = facts["wire_bytes"] / facts["dense_bytes"]
        words.append(f"{part}: peak {change(-saved[-1])}, on the wire x{wire:.3g}")
    numbers = ", ".join(words)
    return Finding(Verdict.HOLDS if min(saved) >= SOME else Verdict.NOT, numbers)


def activations_fill(rows: Rows) -> Finding:
    shares = [1 - state_share(rows.get("single", global_batch=b)) for b in (LARGE, SMALL)]
    numbers = (
        f"activations and temporaries are {shares[0]:.0%} of the peak at batch {LARGE}, "
        f"{shares[1]:.0%} at batch {SMALL}"
    )
    if min(shares) > 0.5:
        return Finding(Verdict.HOLDS, numbers)
    if max(shares) <= 0.5:
        return Finding(Verdict.NOT, numbers)
    return Finding(Verdict.ONLY, numbers, "the batch is large")


def root_of_depth(rows: Rows) -> Finding:
    powers = {r: depth_power(rows, r) for r in ("single", "single+checkpoint:every=sqrt")}
    plain, root = powers.values()
    facts = rows.get("single+checkpoint:every=sqrt", model=DEEP.format(DEPTHS[-1])).first.evidence
    forwards = facts["checkpoint"]["block_forwards"]
    numbers = (
        f"from {DEPTHS[0]} to {DEPTHS[-1]} blocks memory beyond the state grows with depth to the "
        f"power {plain:.2f} plain, {root:.2f} with sqrt; {forwards:.1f} forwards a block"
    )
    kept = root <= 0.7 and forwards <= 2.0
    return Finding(Verdict.HOLDS if kept else Verdict.NOT, numbers)


def depth_power(rows: Rows, recipe: str) -> float:
    """The power of depth that a recipe's memory beyond the state grows with."""
    return power(DEPTHS, [rows.beyond_state(recipe, model=DEEP.format(d)) for d in DEPTHS])


def linear_in_tokens(rows: Rows) -> Finding:
    naive, fused = (token_power(rows, recipe) for recipe in ("single+attend", "single"))
    most = max(TOKENS.values())
    largest = {"model": max(TOKENS, key=TOKENS.__getitem__)}
    saved = rows.saved("single", "single+attend", **largest)
    numbers = (
        f"memory beyond the state grows with tokens to the power {naive:.2f} with the full score "
        f"matrix, {fused:.2f} with torch's fused kernel; {change(-saved)} at {most} tokens"
    )
    return Finding(Verdict.HOLDS if fused <= 1.1 else Verdict.NOT, numbers)


def token_power(rows: Rows, recipe: str) -> float:
    """The power of tokens that a recipe's memory beyond the state grows with, from the second
    model on: in the first, what does not depend on tokens still shows."""
    models = list(TOKENS)[1:]
    beyond = [rows.beyond_state(recipe, model=model) for model in models]
    return power([TOKENS[model] for model in models], beyond)


def paged(rows: Rows) -> Finding:
    saved = rows.saved("single+paged_adam8bit", "single+adam8bit", global_batch=LARGE)
    numbers = f"device peak {change(-saved)} against the same optimizer without paging"
    if saved < SOME:
        return Finding(
            Verdict.ONLY, numbers, "the device is full: pages leave it under pressure alone"
        )
    return Finding(Verdict.HOLDS, numbers)


def change(fraction: float) -> str:
    """A change of a peak as text."""
    return f"{fraction:+.0%}" if abs(fraction) >= 0.005 else "unchanged"


def power(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of the least-squares line through (log x, log y): the p of y ~ x^p."""
    lx, ly = ([math.log(v) for v in values] for values in (x, y))
    mx, my = sum(lx) / len(lx), sum(ly) / len(ly)
    top = sum((a - mx) * (b - my) for a, b in zip(lx, ly, strict=True))
    return top / sum((a - mx) ** 2 for a in lx)


CLAIMS = (
    Claim(
        says="gradient checkpointing saves a medium to high share of memory",
        where="trainers' guides; DeepSpeed and Hugging Face performance docs",
        rule=lambda rows: by_batch(rows, "single+checkpoint", MUCH),
    ),
    Claim(
        says="mixed precision halves memory",
        where="posts on AMP and bf16",
        rule=lambda rows: by_batch(rows, "single+bf16", 0.45),
    ),
    Claim(
        says="training in pure bf16 halves memory",
        where="posts on low-memory fine-tuning",
        rule=lambda rows: by_batch(rows, "single+bf16_pure", 0.45),
    ),
    Claim(
        says="gradient accumulation saves little to medium memory at an equal global batch",
        where="trainers' guides",
        rule=accumulation,
    ),
    Claim(says="pruning saves much memory in training", where="posts", rule=pruning),
    Claim(says="smaller batches save memory", where="everywhere", rule=smaller_batch),
    Claim(
        says="torch.autograd.grad or retain_graph=True costs memory",
        where="forum answers on out-of-memory errors",
        rule=graph_kept,
    ),
    Claim(
        says="compressing or sparsifying gradients saves memory",
        where="posts; papers on communication are quoted for it",
        rule=compression,
    ),
    Claim(
        says="activations, not weights, fill the memory of diffusion models",
        where="posts on training diffusion models",
        rule=activations_fill,
    ),
    Claim(
        says="sqrt(L) checkpoints take O(sqrt L) memory for one more forward",
        where="Chen et al. 2016 (arXiv:1604.06174); lectures",
        rule=root_of_depth,
    ),
    Claim(
        says="fused (flash) attention makes memory linear in the number of tokens",
        where="Dao et al. 2022 (arXiv:2205.14135)",
        rule=linear_in_tokens,
    ),
    Claim(
        says="paged optimizers avoid running out of memory",
        where="Dettmers et al. 2023 (arXiv:2305.14314); bitsandbytes docs",
        rule=paged,
    ),
    Claim(
        says="LoRA needs a fraction of full fine-tuning's memory",
        where="Hu et al. 2021 (arXiv:2106.09685); posts",
        rule=lambda rows: by_batch(rows, "single+lora", 0.5),
    ),
)
