"""Linear layers with 8-bit weights (int8 or float8, a scale per row), and measurements of their
weights.

Imports torch and torchao.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

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
from strategies.engine import TrainingRun
from strategies.evidence.readings import bytes_of, scales, stored
from strategies.subject import Subject

TORCH = KernelPreference.TORCH


KINDS = {"int8": Int8WeightOnlyConfig, "float8": Float8WeightOnlyConfig}
DYNAMIC = "float8 of both operands"
"""Kind besides ``KINDS``: a layer's input is rounded to float8 too."""


def both_operands(values: Tensor) -> nn.Parameter:
    """Return ``values`` in float8 with a scale per row, for products with float8 inputs.

    Each row of an input is rounded when it arrives. torchao's
    Float8DynamicActivationFloat8WeightConfig makes these only on a GPU.
    """
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
    """Return ``values`` [out, in] in 8 bits."""
    if to == DYNAMIC:
        return both_operands(values)
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
        waiting = layer.weight
        if initial.pending(waiting) is None:
            layer.weight = keep(waiting.data)
        else:
            layer.weight = nn.Parameter(waiting.data, requires_grad=False)
            initial.hand_on(waiting, layer.weight, keep=keep)


# ---- measured weights ----


def linears(module: nn.Module, subject: Subject) -> list[str]:
    """Return the names of all linear layers of the blocks, including modulations.

    They hold most bytes of a model. (``Subject.linears`` has those that work on tokens.)
    """
    inside = {id(part) for block in subject.blocks(module) for part in block.modules()}
    named = module.named_modules()
    return [name for name, part in named if isinstance(part, nn.Linear) and id(part) in inside]


def wanted(trained: TrainingRun) -> list[str]:
    """Return the same names for the unedited model of the subject."""
    with torch.device("meta"):
        plain = trained.subject.make()
    return linears(plain, trained.subject)


def held_bytes(layers: list[nn.Module], dtype: str = "") -> int:
    """Return the bytes of all storages that these layers keep alive, without biases.

    Parameters, buffers and attached tensors (a library's scales) count; only those of torch's type
    ``dtype``, if it is given.
    """
    wanted = getattr(torch, dtype) if dtype else None
    held = (tensor for layer in layers for tensor in _tensors(layer))
    return bytes_of(t for t in held if wanted in (None, t.dtype))


def _tensors(layer: nn.Module) -> Iterator[Tensor]:
    for part in layer.modules():
        kept: dict[str, Any] = {**part._parameters, **part._buffers}
        kept.pop("bias", None)
        loose = [value for value in vars(part).values() if isinstance(value, Tensor)]
        for tensor in (*kept.values(), *loose):
            if tensor is not None:
                yield from stored(tensor)
                yield from scales(tensor)
