"""The weights of a model, as one word to compare."""

from __future__ import annotations

import torch

from harness.worker.setup import combined, tensor_digest

__all__ = ["weights_digest"]


def weights_digest(module: torch.nn.Module) -> str:
    """A short hash of every parameter's bytes: equal weights, equal digest."""
    return combined({name: tensor_digest(p) for name, p in module.named_parameters()})
