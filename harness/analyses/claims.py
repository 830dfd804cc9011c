"""The ``claims`` analysis: statements of posts and docs on saving memory, judged by measured rows.

Each rule is a function in ``claim_sweeps`` (over batches) or ``claim_rules`` (over depth and
tokens). A claim without measured rows stays open, with the reason. The suite is
``harness/suite/catalog/claims.yaml``. The report names the one model and machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analyses import claim_rules, claim_sweeps
from harness.analyses.claim_sweeps import (
    FRACTION,
    HALF,
    MUCH,
    SOME,
    Judgement,
    Rule,
    applied,
    share,
)
from harness.analyses.fits import Band
from harness.report.data.grid import Grid, text_grid
from harness.report.data.lookup import Rows
from harness.report.data.rows import Report

KINDS = {
    "#": "count",
    "Claim": "text",
    "Who says so": "text",
    "Verdict": "text",
    "Measured": "text",
}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim and its rule. ``says`` is the claim in our words, ``where`` its source."""

    says: str
    where: str
    rule: Rule


def tables(report: Report) -> list[Grid]:
    """Return each claim with its source, verdict and numbers; then the tables behind them."""
    rows = Rows(report)
    title = f"Claims, measured on {rows.model}" if rows.model else "Claims, measured"
    grid = text_grid("claims", title, KINDS, lines(judged(CLAIMS, rows)), _note(report))
    return [grid, *claim_rules.tables(rows)]


def _note(report: Report) -> str:
    much, half, fraction, some = map(share, (MUCH, HALF, FRACTION, SOME))
    on_gpu = any(group.meter == "cuda" for group in report.groups[:1])
    by = "the allocator's" if on_gpu else "the traced tensors'"
    return (
        "Claims are judged for the model, machine and step of this page, at every batch "
        f"measured. Peaks are {by}, of one training step. Much: from {much} of the peak "
        f"on. Half: from {half} on. A fraction: from {fraction} on. Any, or little: from "
        f"{some} on. Little to medium: from {some} to less than {half}. If a verdict "
        "changes between two batches, the batch between them is interpolated linearly, "
        "so it is less certain than its neighbours. Limit for large batches: the ratio "
        "of the memory that one more sample adds to each, beyond the state, from the two "
        "largest batches. The number behind +- is the distance to the same ratio from "
        "the pair before them, in points. Powers: least squares through the logarithms "
        "of all points, +- the standard error of the slope. Speeds are of the few steps "
        "of each row, so other work on the machine affects them."
    )


def judged(claims: Sequence[Claim], rows: Rows) -> list[tuple[Claim, Judgement]]:
    """Judge each of ``claims`` by these rows."""
    return [(claim, applied(claim.rule, rows)) for claim in claims]


def lines(judgements: list[tuple[Claim, Judgement]]) -> list[list[str]]:
    """Return the lines of a table of ``KINDS``."""
    return [
        [
            str(number),
            claim.says,
            claim.where,
            f"{judgement.verdict.value} {judgement.condition}".strip(),
            judgement.numbers,
        ]
        for number, (claim, judgement) in enumerate(judgements, 1)
    ]


CLAIMS = (
    Claim(
        says="gradient checkpointing saves a medium to high share of memory",
        where="trainers' guides; DeepSpeed and Hugging Face performance docs",
        rule=lambda rows: claim_sweeps.by_batch(rows, "single+checkpoint", Band(least=MUCH)),
    ),
    Claim(
        says="mixed precision saves much memory",
        where="trainers' guides",
        rule=lambda rows: claim_sweeps.by_batch(rows, "single+bf16", Band(least=MUCH)),
    ),
    Claim(
        says="mixed precision halves memory",
        where="posts on AMP and bf16",
        rule=lambda rows: claim_sweeps.by_batch(rows, "single+bf16", Band(least=HALF)),
    ),
    Claim(
        says="training in pure bf16 halves memory",
        where="posts on low-memory fine-tuning",
        rule=claim_sweeps.pure_bf16,
    ),
    Claim(
        says="gradient accumulation saves little to medium memory at an equal global batch",
        where="trainers' guides",
        rule=claim_sweeps.accumulation,
    ),
    Claim(
        says="pruning saves much memory in training",
        where="posts",
        rule=lambda rows: claim_sweeps.pruning(rows, Band(least=MUCH)),
    ),
    Claim(says="smaller batches save memory", where="everywhere", rule=claim_sweeps.smaller_batch),
    Claim(
        says="torch.autograd.grad or retain_graph=True costs memory",
        where="forum answers on out-of-memory errors",
        rule=claim_sweeps.graph_kept,
    ),
    Claim(
        says="compressing or sparsifying gradients saves memory",
        where="posts; papers on communication are quoted for it",
        rule=claim_sweeps.compression,
    ),
    Claim(
        says="activations, not weights, fill the memory of diffusion models",
        where="posts on training diffusion models",
        rule=claim_sweeps.activations_fill,
    ),
    Claim(
        says="sqrt(L) checkpoints take O(sqrt L) memory for one more forward",
        where="Chen et al. 2016 (arXiv:1604.06174); lectures",
        rule=claim_rules.root_of_depth,
    ),
    Claim(
        says="fused (flash) attention makes memory linear in the number of tokens",
        where="Dao et al. 2022 (arXiv:2205.14135)",
        rule=claim_rules.linear_in_tokens,
    ),
    Claim(
        says="paged optimizers avoid running out of memory",
        where="Dettmers et al. 2023 (arXiv:2305.14314); bitsandbytes docs",
        rule=claim_rules.paged,
    ),
    Claim(
        says="LoRA needs a fraction of full fine-tuning's memory",
        where="Hu et al. 2021 (arXiv:2106.09685); posts",
        rule=lambda rows: claim_sweeps.by_batch(rows, "single+lora", Band(least=FRACTION)),
    ),
)
