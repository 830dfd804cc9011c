"""Ranks whose parts of the same samples are not one training: what a run of ``ddp+sp`` does instead
-> (who must notice, the sabotage: ``harness.worker.sabotage_ranks``)."""

from __future__ import annotations

__all__ = ["LOST"]

LOST = {
    "attention stays within a part": ("sp", "attention_of_own_tokens"),
    "one part's positions for all": ("sp", "positions_of_the_first_part"),
    "gradients stay within a part": ("ddp", "gradients_not_averaged"),
}
