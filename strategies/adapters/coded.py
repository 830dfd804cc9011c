"""Linear layers whose frozen weights are stored in 8 bits, and decoded for each product.

torchao's weight-only layers are of tensor classes whose bytes cannot be drawn one by one, streamed,
or told from what they wrap; a code a weight and a scale a row need no class of their own.

Imports torch: import it only where it is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strategies import initial
from strategies.base import demand
from strategies.evidence.stored import bytes_of, stored
from strategies.precision.autocast import autocast_dtype

__all__ = ["ERROR", "Coded", "code", "coded_facts"]

LARGEST = {"int8": 127.0, "fp8": 448.0}
ERROR = {"int8": 0.03, "fp8": 0.05}
"""What coding may lose of a matrix, as a share of its norm: a row of normal numbers loses some
0.8 % in int8 (steps of a 127th of its largest) and 2.6 % in float8 (three bits of mantissa)."""


def coded(values: Tensor, to: str) -> tuple[Tensor, Tensor]:
    """Codes of a matrix [out, in] as bytes, and the scale of each row, float32 [out, 1]."""
    most = LARGEST[to]
    scale = values.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / most
    scale = scale.bfloat16().float()  # so that decoding is exact in 16 bits too
    parts = (values.float() / scale).clamp_(-most, most)
    codes = parts.round().to(torch.int8) if to == "int8" else parts.to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scale


def decoded(codes: Tensor, scale: Tensor, to: str, dtype: torch.dtype) -> Tensor:
    """The matrix that codes stand for, in the type in which it is multiplied."""
    stored = torch.int8 if to == "int8" else torch.float8_e4m3fn
    return codes.view(stored).to(dtype) * scale.to(dtype)


class Product(torch.autograd.Function):
    """x @ W^T + b with W decoded anew in backward: a decoded copy is never kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, to: str
    ) -> Tensor:
        ctx.save_for_backward(codes)
        ctx.scale, ctx.to = scale, to  # of all calls one: nothing to be kept of this one
        return F.linear(x, decoded(codes, scale, to, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (codes,) = ctx.saved_tensors
        dx = db = None
        if ctx.needs_input_grad[0]:
            dx = gradient @ decoded(codes, ctx.scale, ctx.to, gradient.dtype)
        if ctx.needs_input_grad[3]:
            db = gradient.flatten(0, -2).sum(0)
        return dx, None, None, db, None


class Coded(nn.Linear):
    """A linear layer with codes for a weight: uint8 [out, in], and ``scale``, float32 [out, 1].

    ``error`` is what coding lost of the weight, as a share of its norm.
    """

    def __init__(self, linear: nn.Linear, to: str) -> None:
        with initial.valueless():
            super().__init__(linear.in_features, linear.out_features, bias=False)
        self.to_type, self.error = to, 0.0
        self.register_buffer("scale", None)
        self.bias = linear.bias
        if initial.pending(linear.weight) is None:
            self.weight = self.take(linear.weight.data)
        else:
            self.weight = nn.Parameter(linear.weight.data, requires_grad=False)
            initial.hand_on(linear.weight, self.weight, keep=self.take)

    def take(self, values: Tensor) -> nn.Parameter:
        """The codes of the weight's first values, as the weight; its scales stay here."""
        codes, self.scale = coded(values, self.to_type)
        lost = values.float() - decoded(codes, self.scale, self.to_type, torch.float32)
        self.error = float(lost.norm() / values.float().norm().clamp_min(1e-12))
        return nn.Parameter(codes, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(autocast_dtype(x) or x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return Product.apply(x, self.weight, self.scale, bias, self.to_type)


def code(module: nn.Module, names: Iterable[str], to: str) -> None:
    """Store the weights of the linear layers of these names in 8 bits."""
    for name in names:
        module.set_submodule(name, Coded(module.get_submodule(name), to))


def coded_facts(module: nn.Module, wanted: int, to: str) -> dict[str, Any]:
    """Bytes that really hold the layers' weights (``coded_bytes_here``: on this rank), and what
    coding lost; the scales are whole on every rank."""
    layers = [m for m in module.modules() if isinstance(m, Coded) and m.to_type == to]
    demand(len(layers) == wanted, f"{len(layers)} layers are stored as {to}, of {wanted}")
    elements = sum(m.in_features * m.out_features for m in layers)
    size = sum(t.nbytes for m in layers for t in _held(m) if t is not m.bias and t is not m.scale)
    demand(size == elements, f"{size} bytes hold {elements} weights")
    worst = max(m.error for m in layers)
    demand(0 < worst <= ERROR[to], f"coding lost {worst:.2g} of a weight, of {ERROR[to]} at most")
    here = bytes_of(part for m in layers for part in stored(m.weight.data) if part.numel())
    return {
        "layers": wanted,
        "coded_elements": elements,
        "coded_bytes": size,
        "coded_bytes_here": here,
        "scale_bytes": sum(m.scale.nbytes for m in layers),
        "largest_weight_error": float(f"{worst:.2g}"),
    }


def _held(layer: Coded) -> list[Tensor]:
    """All tensors that a layer holds on to, however it calls them."""
    own = [*layer._parameters.values(), *layer._buffers.values(), *vars(layer).values()]
    return [value for value in own if isinstance(value, Tensor)]
