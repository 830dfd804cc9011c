"""Linear layers whose weights are 8 bits, integers or floats, with a scale a row.

Imports torch and torchao: import it only where both are there.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

from strategies import initial

__all__ = ["quantize"]

KINDS = {"int8": Int8WeightOnlyConfig, "float8": Float8WeightOnlyConfig}


def packed(values: Tensor, to: str) -> nn.Parameter:
    """``values`` [out, in] in 8 bits."""
    with torch.device("meta"):
        layer = nn.Linear(values.shape[1], values.shape[0], bias=False)
    layer.weight = nn.Parameter(values, requires_grad=False)
    quantize_(layer, KINDS[to](set_inductor_config=False))
    return layer.weight


def quantize(module: nn.Module, names: list[str], to: str) -> None:
    """Store the weights of the layers of these names so, each as it is drawn."""
    keep = functools.partial(packed, to=to)
    for name in names:
        layer = module.get_submodule(name)
        waiting = layer.weight
        if initial.pending(waiting) is None:
            layer.weight = keep(waiting.data)
        else:
            layer.weight = nn.Parameter(waiting.data, requires_grad=False)
            initial.hand_on(waiting, layer.weight, keep=keep)
