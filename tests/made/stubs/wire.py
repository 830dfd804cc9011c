"""Hooks on the wire that are others: (strategy, what it attaches instead)."""

from __future__ import annotations

import torch

from strategies.communication import compress, topk, wire
from strategies.communication import compress as power_sgd
from strategies.communication.compress import Compress
from strategies.communication.topk import TopK


def dense(self, trained):
    """torch's own all-reduce, counted."""
    hooks, _, counted = wire.counted_hooks()
    return wire.Compression(trained, lambda bucket: hooks.allreduce_hook(None, bucket), counted)


class Forgetful(topk.TopKHook):
    """Keeps nothing back."""

    def _largest(self, place, gradient):
        kept, where = super()._largest(place, gradient)
        self.left[place] = torch.zeros_like(gradient)
        return kept, where


def every_matrix(_, trained):
    """Sends thin matrices even where they are larger than the gradient."""
    hook = power_sgd.PowerSgd(trained, 4)
    hook.power.min_compression_rate = 0
    return hook


LOST = {
    "no hook at all": (Compress(), lambda *_: None),
    "dense for fp16": (Compress(kind="fp16"), dense),
    "bf16 for fp16": (Compress(kind="fp16"), lambda _, t: compress.cast(t, "bf16")),
    "fp16 for bf16": (Compress(), lambda _, t: compress.cast(t, "fp16")),
    "dense for powersgd": (Compress(kind="powersgd"), dense),
    "another rank": (Compress(kind="powersgd"), lambda _, t: power_sgd.PowerSgd(t, 2)),
    "every matrix thin": (Compress(kind="powersgd"), every_matrix),
    "bf16 for powersgd": (Compress(kind="powersgd"), lambda _, t: compress.cast(t, "bf16")),
    "top-k for bf16": (Compress(), lambda _, t: topk.TopKHook(t, 0.01)),
    "no top-k hook": (TopK(), lambda *_: None),
    "dense for top-k": (TopK(), dense),
    "more is sent": (TopK(), lambda _, t: topk.TopKHook(t, 0.02)),
    "the rest is forgotten": (TopK(), lambda _, t: Forgetful(t, 0.01)),
}
"""What happened instead -> (strategy, its ``attach``)."""
