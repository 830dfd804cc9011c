"""Linear layers with matrices in 8 bits, a scale a row. Imports torch.

``Product`` decodes the codes, or rounds the other operand to int8 too, and multiplies integers. The
rules are OneTrainer's (LinearW8A8.py), but its scale is one for the whole weight.

torchao 0.18 has no such layer that trains. With its Int8DynamicActivationInt8WeightConfig the
output of a layer has no graph ("element 0 of tensors does not require grad"). Beside an adapter,
this part of the gradient would be missing without an error. Its int8_mixed_precision_training
trains, and keeps the weights in full.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strategies import initial
from strategies.base import demand
from strategies.evidence.readings import bytes_of, stored
from strategies.precision.autocast import autocast_dtype

LARGEST = {"int8": 127.0, "fp8": 448.0}
LEAST_ROWS = 17
"""Rows that cuBLAS's product of int8 matrices needs (torch 2.13, native/cuda/Blas.cpp)."""


def coded(values: Tensor, to: str) -> tuple[Tensor, Tensor]:
    """Return the codes of a matrix [out, in] as bytes, and each row's scale, float32 [out, 1]."""
    most = LARGEST[to]
    scale = values.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / most
    scale = scale.bfloat16().float()  # so that decoding is exact in 16 bits too
    parts = (values.float() / scale).clamp_(-most, most)
    codes = parts.round().to(torch.int8) if to == "int8" else parts.to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scale


def decoded(codes: Tensor, scale: Tensor, to: str, dtype: torch.dtype) -> Tensor:
    """Return the matrix of the codes, in the type of the product."""
    stored = torch.int8 if to == "int8" else torch.float8_e4m3fn
    return codes.view(stored).to(dtype) * scale.to(dtype)


def multiplied(x: Tensor, codes: Tensor) -> Tensor:
    """Return x [..., n] times int8 ``codes`` [n, m] as float32 [..., m].

    Each row of ``x`` is rounded to int8 with a scale of its own.
    """
    rows, scale = coded(x.flatten(0, -2), "int8")
    out = torch._int_mm(rows.view(torch.int8), codes).float().mul_(scale)
    return out.unflatten(0, x.shape[:-1])


class Product(torch.autograd.Function):
    """x @ W^T + b with W decoded again in backward: a decoded copy is never kept.

    ``dynamic``: both operands are int8, and so for the gradient of x. A scale belongs to a row of
    W, over which backward sums. It is multiplied into the gradient before that is rounded.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        to: str,
        dynamic: bool,
    ) -> Tensor:
        ctx.save_for_backward(codes)
        ctx.scale, ctx.to, ctx.dynamic = scale, to, dynamic  # equal for all calls, so not saved
        if not dynamic:
            return F.linear(x, decoded(codes, scale, to, x.dtype), bias)
        out = multiplied(x, codes.view(torch.int8).t()).mul_(scale.view(-1)).to(x.dtype)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (codes,) = ctx.saved_tensors
        dx = db = None
        if ctx.needs_input_grad[0] and ctx.dynamic:
            scaled = gradient * ctx.scale.view(-1)
            dx = multiplied(scaled, codes.view(torch.int8)).to(gradient.dtype)
        elif ctx.needs_input_grad[0]:
            dx = gradient @ decoded(codes, ctx.scale, ctx.to, gradient.dtype)
        if ctx.needs_input_grad[3]:
            db = gradient.flatten(0, -2).sum(0)
        return dx, None, None, db, None, None


# ---- layers ----


class Coded(nn.Linear):
    """Linear layer with codes as its weight: uint8 [out, in], and ``scale``, float32 [out, 1].

    ``dynamic``: products take int8 operands.
    """

    def __init__(self, linear: nn.Linear, to: str, dynamic: bool = False) -> None:
        with initial.valueless():
            super().__init__(linear.in_features, linear.out_features, bias=False)
        self.to_type, self.dynamic = to, dynamic
        self.register_buffer("scale", None)
        self.bias = linear.bias
        self.weight = initial.kept(linear.weight, self.take)

    def take(self, values: Tensor) -> nn.Parameter:
        """Return the codes of the weight's first values as a parameter, and store their scales."""
        codes, self.scale = coded(values, self.to_type)
        return nn.Parameter(codes, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(autocast_dtype(x) or x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        dynamic = self.dynamic and x.shape[:-1].numel() >= LEAST_ROWS
        return Product.apply(x, self.weight, self.scale, bias, self.to_type, dynamic)


def code(module: nn.Module, names: Iterable[str], to: str, dynamic: bool = False) -> None:
    """Store the weights of the named linear layers in 8 bits; ``dynamic``: see ``Coded``."""
    for name in names:
        module.set_submodule(name, Coded(module.get_submodule(name), to, dynamic))


def coded_facts(module: nn.Module, least: int, to: str) -> dict[str, Any]:
    """Return the bytes that hold the weights of the layers, all and on this rank, without scales;
    ``least``: the fewest coded layers."""
    layers = [m for m in module.modules() if isinstance(m, Coded) and m.to_type == to]
    demand(len(layers) >= least, f"{len(layers)} layers are stored as {to}, expected {least}")
    elements, size = sum(m.in_features * m.out_features for m in layers), 0
    for m in layers:  # all tensors that the layer references, under any name
        held = (*m._parameters.values(), *m._buffers.values(), *vars(m).values())
        tensors = [value for value in held if isinstance(value, Tensor)]
        size += sum(t.nbytes for t in tensors if t is not m.bias and t is not m.scale)
    demand(size == elements, f"{size} bytes hold {elements} weights")
    here = bytes_of(part for m in layers for part in stored(m.weight.data) if part.numel())
    return {"layers": len(layers), "coded_bytes": size, "coded_bytes_here": here}


def unpacked(module: nn.Module) -> tuple[str, ...]:
    """Return the names of linear layers stored in full that diffusers would pack.

    These exclude adapters, and layers that the model's class keeps in float32. Source: diffusers
    0.40, quantizers/bitsandbytes/utils.py (_replace_with_bnb_linear) and bnb_quantizer.py, which
    skips ``_keep_in_fp32_modules``.
    """
    in_fp32 = getattr(module, "_keep_in_fp32_modules", None) or ()

    def is_kept(name: str) -> bool:
        last = name.rpartition(".")[2]  # or the layer, or a module around it
        return any(key in (name, last) or f"{key}." in name for key in in_fp32)

    return tuple(
        name
        for name, part in module.named_modules()
        if type(part) is nn.Linear and "lora_" not in name and not is_kept(name)
    )
