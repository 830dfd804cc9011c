"""Linear layers whose weights are 8 bits, integers or floats, with a scale a row.

Imports torch and torchao: import it only where both are there.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torchao.float8.inference import Float8MMConfig
from torchao.quantization import (
    Float8Tensor,
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    PerRow,
    quantize_,
)
from torchao.quantization.quantize_.common import KernelPreference
from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

from strategies import initial

TORCH = KernelPreference.TORCH

__all__ = ["DYNAMIC", "quantize"]

KINDS = {"int8": Int8WeightOnlyConfig, "float8": Float8WeightOnlyConfig}
DYNAMIC = "float8 of both operands"
"""In the place of one of ``KINDS``: what a layer is given is rounded to float8 too."""


def both_operands(values: Tensor) -> nn.Parameter:
    """``values`` in float8 with a scale a row, to be multiplied by operands of which each row is
    rounded so as it comes (Float8DynamicActivationFloat8WeightConfig of torchao, which makes these
    where there is a GPU alone)."""
    each = QuantizeTensorToFloat8Kwargs(granularity=PerRow(), kernel_preference=TORCH)
    made = Float8Tensor.from_hp(
        values,
        granularity=PerRow(),
        mm_config=Float8MMConfig(use_fast_accum=True),
        kernel_preference=TORCH,
        act_quant_kwargs=each,
    )
    return nn.Parameter(made, requires_grad=False)


def packed(values: Tensor, to: str) -> nn.Parameter:
    """``values`` [out, in] in 8 bits."""
    if to == DYNAMIC:
        return both_operands(values)
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
