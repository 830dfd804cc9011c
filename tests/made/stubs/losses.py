"""Losses over a vocabulary that hold other logits than they say."""

from __future__ import annotations

from strategies.losses import functions
from strategies.losses.cross_entropy import CrossEntropy
from tests.made.stubs.parts import Table, nothing


def by(function):
    def edit(self, module, subject):
        subject.vocabulary(module).cross_entropy = function

    return edit


def kept_chunks(x, weight, bias, targets):
    """Chunks whose logits are all kept for backward."""
    parts = zip(x.chunk(8), targets.chunk(8), strict=True)
    return sum(functions.full(some, weight, bias, wanted) for some, wanted in parts)


CHUNKED, FUSED = "single+cross_entropy", "single+cross_entropy:kind=fused"

LOST: Table = {
    "all logits, not an eighth": (CHUNKED, CrossEntropy, "edit_model", nothing),
    "a half of the logits, not an eighth": (
        CHUNKED, CrossEntropy, "edit_model", by(functions.chunked(2)),
    ),
    "an eighth of the logits at a time, all kept": (
        CHUNKED, CrossEntropy, "edit_model", by(kept_chunks),
    ),
    "all logits, not torch's fused loss": (FUSED, CrossEntropy, "edit_model", nothing),
    "chunked, not torch's fused loss": (
        FUSED, CrossEntropy, "edit_model", by(functions.chunked(8)),
    ),
    "fused, not all logits": (
        "single+cross_entropy:kind=full", CrossEntropy, "edit_model", by(functions.fused),
    ),
}  # fmt: skip
