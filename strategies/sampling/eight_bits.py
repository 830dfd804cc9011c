"""Linear layers with 8-bit weights (int8 or float8, a scale per row), and measurements of their
weights.

Imports torch and torchao.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

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
from strategies.evidence.readings import scales, stored
from strategies.subject import Subject

TORCH = KernelPreference.TORCH
KINDS = {"int8": Int8WeightOnlyConfig, "float8": Float8WeightOnlyConfig}
DYNAMIC = "float8 of both operands"
"""Kind besides ``KINDS``: a layer's input is rounded to float8 too."""


def packed(values: Tensor, to: str) -> nn.Parameter:
    """Return ``values`` [out, in] in 8 bits.

    Of both operands, each row of an input is rounded when it arrives. torchao's
    Float8DynamicActivationFloat8WeightConfig makes such weights only on a GPU.
    """
    if to == DYNAMIC:
        each = QuantizeTensorToFloat8Kwargs(granularity=PerRow(), kernel_preference=TORCH)
        made = Float8Tensor.from_hp(
            values,
            granularity=PerRow(),
            mm_config=Float8MMConfig(use_fast_accum=True),
            kernel_preference=TORCH,
            act_quant_kwargs=each,
        )
        return nn.Parameter(made, requires_grad=False)
    with torch.device("meta"):
        layer = nn.Linear(values.shape[1], values.shape[0], bias=False)
    layer.weight = nn.Parameter(values, requires_grad=False)
    quantize_(layer, KINDS[to](set_inductor_config=False))
    return layer.weight


def quantize(module: nn.Module, names: list[str], to: str) -> None:
    """Store the weights of the named layers in 8 bits, each when it is drawn."""
    keep = functools.partial(packed, to=to)
    for name in names:
        layer = module.get_submodule(name)
        layer.weight = initial.kept(layer.weight, keep)


# ---- measured weights ----


def linears(module: nn.Module, subject: Subject) -> list[str]:
    """Return the names of all linear layers of the blocks, including modulations.

    They hold most bytes of a model. (``Subject.linears`` has those that work on tokens.)
    """
    inside = {id(part) for block in subject.blocks(module) for part in block.modules()}
    named = module.named_modules()
    return [name for name, part in named if isinstance(part, nn.Linear) and id(part) in inside]


def held(layers: Iterable[nn.Module]) -> list[Tensor]:
    """Return all plain tensors that these layers keep alive, without biases: parameters, buffers
    and attached tensors (a library's scales)."""
    found: list[Tensor] = []
    for part in (part for layer in layers for part in layer.modules()):
        own = [*part._parameters.items(), *part._buffers.items(), *vars(part).items()]
        for tensor in (v for k, v in own if isinstance(v, Tensor) and k != "bias"):
            found += [*stored(tensor), *scales(tensor)]
    return found
