"""The story "claims": what posts and docs say about saving memory, judged by measured rows.

The rule of each claim is a small function in ``claim_rules``: the numbers decide, and a claim
whose rows were not measured stays open, with the reason. The suite is
``harness/suite/catalog/claims.yaml``; every claim is about one DiT, one machine and one step,
which the report names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.report.data.grid import Grid, text_grid
from harness.report.data.lookup import Missing, Rows
from harness.report.data.rows import Report
from harness.report.stories import claim_rules
from harness.report.stories.claim_verdicts import (
    FRACTION,
    HALF,
    MUCH,
    SOME,
    Judgement,
    Verdict,
    share,
)

__all__ = ["CLAIMS", "Claim", "judge", "tables"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """``says`` is the claim in our words, ``where`` who makes it."""

    says: str
    where: str
    rule: Callable[[Rows], Judgement]


def tables(report: Report) -> list[Grid]:
    """Each claim, who makes it, the verdict and the numbers."""
    lines = []
    for number, (claim, judgement) in enumerate(judge(report), 1):
        verdict = judgement.verdict.value + (
            f" {judgement.condition}" if judgement.condition else ""
        )
        lines.append([str(number), claim.says, claim.where, verdict, judgement.numbers])
    heads = ("Claim", "Who says so", "Verdict", "Measured")
    kinds = {"#": "count", **dict.fromkeys(heads, "text")}
    much, half, fraction, some = map(share, (MUCH, HALF, FRACTION, SOME))
    note = (
        "Peaks are those of one training step: the allocator's on a GPU, the traced tensors' "
        "without one. Each verdict is about the model and machine named below, at the batches it "
        f"names (else {claim_rules.LARGE}). Much, or medium: from {much} of the peak on; half: "
        f"from {half}; down to a fraction: from {fraction}; any: from {some}. Speeds are of the "
        "few steps that each row took: other work on the machine shows in them."
    )
    return [text_grid("claims", "Claims, measured", kinds, lines, note)]


def judge(report: Report) -> list[tuple[Claim, Judgement]]:
    """Every claim with its judgement."""
    rows = Rows(report)
    return [(claim, _judged(claim, rows)) for claim in CLAIMS]


def _judged(claim: Claim, rows: Rows) -> Judgement:
    try:
        return claim.rule(rows)
    except Missing as missing:
        return Judgement(Verdict.OPEN, str(missing))


CLAIMS = (
    Claim(
        says="gradient checkpointing saves a medium to high share of memory",
        where="trainers' guides; DeepSpeed and Hugging Face performance docs",
        rule=lambda rows: claim_rules.by_batch(rows, "single+checkpoint", MUCH),
    ),
    Claim(
        says="mixed precision saves much memory",
        where="trainers' guides",
        rule=lambda rows: claim_rules.by_batch(rows, "single+bf16", MUCH),
    ),
    Claim(
        says="mixed precision halves memory",
        where="posts on AMP and bf16",
        rule=lambda rows: claim_rules.by_batch(rows, "single+bf16", HALF),
    ),
    Claim(
        says="training in pure bf16 halves memory",
        where="posts on low-memory fine-tuning",
        rule=claim_rules.pure_bf16,
    ),
    Claim(
        says="gradient accumulation saves little to medium memory at an equal global batch",
        where="trainers' guides",
        rule=claim_rules.accumulation,
    ),
    Claim(says="pruning saves much memory in training", where="posts", rule=claim_rules.pruning),
    Claim(says="smaller batches save memory", where="everywhere", rule=claim_rules.smaller_batch),
    Claim(
        says="torch.autograd.grad or retain_graph=True costs memory",
        where="forum answers on out-of-memory errors",
        rule=claim_rules.graph_kept,
    ),
    Claim(
        says="compressing or sparsifying gradients saves memory",
        where="posts; papers on communication are quoted for it",
        rule=claim_rules.compression,
    ),
    Claim(
        says="activations, not weights, fill the memory of diffusion models",
        where="posts on training diffusion models",
        rule=claim_rules.activations_fill,
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
        rule=lambda rows: claim_rules.by_batch(rows, "single+lora", FRACTION),
    ),
)
