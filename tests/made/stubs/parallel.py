"""Ranks whose parts of the same samples, or of the same weights, are not one training: what a run
of ``ddp+sp`` or ``fsdp2+tp`` does instead -> (whose evidence must notice beside
parity, the sabotage: ``tests.sabotage.ranks``)."""

from __future__ import annotations

LOST = {
    "attention stays within a part": ("sp", "attention_of_own_tokens"),
    "one part's positions for all": ("", "positions_of_the_first_part"),
    "gradients stay within a part": ("ddp", "gradients_not_averaged"),
}

LOST_PARTS = {
    "products are of a part": ("tp", "products_not_summed"),
    "gradients are of a part": ("tp", "gradients_not_summed"),
}
