"""Linear layers whose weights are 8 bits, integers or floats, with a scale a row.

Imports torch and torchao: import it only where both are there.
"""

from __future__ import annotations

import contextlib
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


# ---- layers ----
# The linear layers of a model's blocks, and what a layer's own product shows of its weight.
#
# Imports torch: import it where torch is there.


def linears(module: nn.Module, subject: Subject) -> list[str]:
    """Names of all linear layers of the blocks, those of modulations too: what the bytes of a model
    are. (``Subject.linears`` has those that work on tokens.)"""
    inside = {id(part) for block in subject.blocks(module) for part in block.modules()}
    named = module.named_modules()
    return [name for name, part in named if isinstance(part, nn.Linear) and id(part) in inside]


def wanted(trained: TrainingRun) -> list[str]:
    """The same of the model as its subject makes it, whatever became of it."""
    with torch.device("meta"):
        plain = trained.subject.make()
    return linears(plain, trained.subject)


def shown(layer: nn.Module, inputs: int, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] that a layer really multiplies by: its output for each unit vector,
    without the bias."""
    device = next(tensor.device for tensor in _tensors(layer))
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        eye = torch.eye(inputs, dtype=dtype, device=device)
        with _without(layer.bias):  # taken off afterwards it would round
            return layer(eye).float().t()


@contextlib.contextmanager
def _without(bias: Tensor | None) -> Iterator[None]:
    """While it lasts a layer's bias, if it has one, is zero."""
    kept = None if bias is None else bias.clone()
    if bias is not None:
        bias.zero_()
    try:
        yield
    finally:
        if bias is not None:
            bias.copy_(kept)


def most_levels(weight: Tensor, together: int) -> int:
    """The most values that differ among ``together`` neighbours of a weight, its last incomplete
    group left out."""
    flat = weight.flatten()
    whole = flat[: len(flat) // together * together].view(-1, together)
    ordered = whole.sort(dim=1).values
    return int((ordered.diff(dim=1) != 0).sum(dim=1).max()) + 1


def levels_of_rows(weight: Tensor) -> int:
    """How many values differ in a weight whose rows are divided by the largest of each, up to
    2^-16: rows of one scale each have codes in common then. 0 where the weight is of 16 bits, whose
    own rounding is coarser than that."""
    if weight.bfloat16().float().equal(weight) or weight.half().float().equal(weight):
        return 0
    largest = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-30)
    return len((weight / largest * 2**16).round().unique())


def held_bytes(layers: list[nn.Module], dtype: str = "") -> int:
    """Bytes of all storages that these layers keep alive but for their biases: parameters, buffers
    and what hangs on them (scales of a library's own); of torch's type ``dtype`` alone, if one is
    named."""
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
