"""What posts and docs claim about saving memory, judged by measured rows.

Each claim is one small function of the rows (``harness.report.claim_rules``): the numbers decide,
and a row that was not measured leaves its claim undecided with the reason. ``suites/claims.yaml``
has the rows; every claim is about one DiT, one machine and one step, which the report names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.report import claim_rules as rules
from harness.report.claim_verdicts import FRACTION, HALF, MUCH, Finding, Verdict
from harness.report.lookup import Missing, Rows
from harness.report.rows import Report

__all__ = ["CLAIMS", "Claim", "judge"]


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


CLAIMS = (
    Claim(
        says="gradient checkpointing saves a medium to high share of memory",
        where="trainers' guides; DeepSpeed and Hugging Face performance docs",
        rule=lambda rows: rules.by_batch(rows, "single+checkpoint", MUCH),
    ),
    Claim(
        says="mixed precision saves much memory",
        where="trainers' guides",
        rule=lambda rows: rules.by_batch(rows, "single+bf16", MUCH),
    ),
    Claim(
        says="mixed precision halves memory",
        where="posts on AMP and bf16",
        rule=lambda rows: rules.by_batch(rows, "single+bf16", HALF),
    ),
    Claim(
        says="training in pure bf16 halves memory",
        where="posts on low-memory fine-tuning",
        rule=rules.pure_bf16,
    ),
    Claim(
        says="gradient accumulation saves little to medium memory at an equal global batch",
        where="trainers' guides",
        rule=rules.accumulation,
    ),
    Claim(says="pruning saves much memory in training", where="posts", rule=rules.pruning),
    Claim(says="smaller batches save memory", where="everywhere", rule=rules.smaller_batch),
    Claim(
        says="torch.autograd.grad or retain_graph=True costs memory",
        where="forum answers on out-of-memory errors",
        rule=rules.graph_kept,
    ),
    Claim(
        says="compressing or sparsifying gradients saves memory",
        where="posts; papers on communication are quoted for it",
        rule=rules.compression,
    ),
    Claim(
        says="activations, not weights, fill the memory of diffusion models",
        where="posts on training diffusion models",
        rule=rules.activations_fill,
    ),
    Claim(
        says="sqrt(L) checkpoints take O(sqrt L) memory for one more forward",
        where="Chen et al. 2016 (arXiv:1604.06174); lectures",
        rule=rules.root_of_depth,
    ),
    Claim(
        says="fused (flash) attention makes memory linear in the number of tokens",
        where="Dao et al. 2022 (arXiv:2205.14135)",
        rule=rules.linear_in_tokens,
    ),
    Claim(
        says="paged optimizers avoid running out of memory",
        where="Dettmers et al. 2023 (arXiv:2305.14314); bitsandbytes docs",
        rule=rules.paged,
    ),
    Claim(
        says="LoRA needs a fraction of full fine-tuning's memory",
        where="Hu et al. 2021 (arXiv:2106.09685); posts",
        rule=lambda rows: rules.by_batch(rows, "single+lora", FRACTION),
    ),
)
