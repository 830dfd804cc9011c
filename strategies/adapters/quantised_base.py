"""Linear layers with quantized frozen weights: 8-bit codes, and bitsandbytes' 4-bit NormalFloat.

torchao's weight-only layers use tensor classes whose bytes cannot be drawn one by one, streamed, or
told from the tensors inside. Codes with a scale per row need no class of their own.

Imports torch and bitsandbytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any
from unittest import mock

import bitsandbytes
import torch
from torch import Tensor, nn

from strategies import initial
from strategies.adapters.coded import coded, decoded, product
from strategies.base import demand
from strategies.evidence.readings import bytes_of, stored
from strategies.precision.autocast import autocast_dtype

ERROR = {"int8": 0.03, "fp8": 0.05}
"""Largest relative error in norm of a quantized matrix.

A row of normal numbers loses about 0.8 % in int8 (steps of a 127th of its largest) and 2.6 % in
float8 (three bits of mantissa).
"""


class Coded(nn.Linear):
    """Linear layer with codes as its weight: uint8 [out, in], and ``scale``, float32 [out, 1].

    ``error`` is the relative quantization error of the weight in norm. ``dynamic``: products take
    int8 operands (``strategies.adapters.coded``).
    """

    def __init__(self, linear: nn.Linear, to: str, dynamic: bool = False) -> None:
        with initial.valueless():
            super().__init__(linear.in_features, linear.out_features, bias=False)
        self.to_type, self.dynamic, self.error = to, dynamic, 0.0
        self.register_buffer("scale", None)
        self.bias = linear.bias
        if initial.pending(linear.weight) is None:
            self.weight = self.take(linear.weight.data)
        else:
            self.weight = nn.Parameter(linear.weight.data, requires_grad=False)
            initial.hand_on(linear.weight, self.weight, keep=self.take)

    def take(self, values: Tensor) -> nn.Parameter:
        """Return the codes of the weight's first values as a parameter, and store their scales."""
        codes, self.scale = coded(values, self.to_type)
        lost = values.float() - decoded(codes, self.scale, self.to_type, torch.float32)
        self.error = float(lost.norm() / values.float().norm().clamp_min(1e-12))
        return nn.Parameter(codes, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(autocast_dtype(x) or x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return product(x, self.weight, self.scale, bias, self.to_type, self.dynamic)


def code(module: nn.Module, names: Iterable[str], to: str, dynamic: bool = False) -> None:
    """Store the weights of the named linear layers in 8 bits; ``dynamic``: see ``Coded``."""
    for name in names:
        module.set_submodule(name, Coded(module.get_submodule(name), to, dynamic))


def coded_facts(module: nn.Module, wanted: int, to: str, more: bool = False) -> dict[str, Any]:
    """Return the bytes that hold the layers' weights, and their largest quantization error.

    ``wanted``: the number of coded layers; ``more``: there may be others. ``coded_bytes_here``:
    bytes on this rank; scales are whole on every rank.
    """
    layers = [m for m in module.modules() if isinstance(m, Coded) and m.to_type == to]
    enough = len(layers) == wanted or (more and len(layers) > wanted)
    demand(enough, f"{len(layers)} layers are stored as {to}, expected {wanted}")
    elements = sum(m.in_features * m.out_features for m in layers)
    size = sum(t.nbytes for m in layers for t in _held(m) if t is not m.bias and t is not m.scale)
    demand(size == elements, f"{size} bytes hold {elements} weights")
    worst = max(m.error for m in layers)
    demand(
        0 < worst <= ERROR[to],
        f"quantization changed a weight by {worst:.2g} (relative), expected at most {ERROR[to]}",
    )
    here = bytes_of(part for m in layers for part in stored(m.weight.data) if part.numel())
    return {
        "layers": len(layers),
        "coded_elements": elements,
        "coded_bytes": size,
        "coded_bytes_here": here,
        "scale_bytes": sum(m.scale.nbytes for m in layers),
        "largest_weight_error": float(f"{worst:.2g}"),
    }


def _held(layer: Coded) -> list[Tensor]:
    """Return all tensors that a layer references, under any name."""
    own = [*layer._parameters.values(), *layer._buffers.values(), *vars(layer).values()]
    return [value for value in own if isinstance(value, Tensor)]


# ---- 4-bit NormalFloat ----


NF4 = {"requires_grad": False, "quant_type": "nf4"}


class Packed(bitsandbytes.nn.Linear4bit):
    """bitsandbytes' layer in autocast's type, if autocast is on.

    Its own forward ignores autocast, and rounds its bias to the input's type permanently.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(autocast_dtype(x) or x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        # Gathered codes (FSDP2) are only bytes: the layer has the rest.
        state = getattr(self.weight, "quant_state", self.quant_state)
        return bitsandbytes.matmul_4bit(x, self.weight, state, bias=bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save only codes and bias: scales follow from the first weights, and loading has no key
        for them."""
        nn.Linear._save_to_state_dict(self, destination, prefix, keep_vars)


def parameter(data: Tensor, **settings: Any) -> nn.Parameter:
    """Return bitsandbytes' parameter of ``data`` for nf4, not packed yet.

    Its class needs a storage. In a prediction another parameter has the attributes that are read.
    """
    if not initial.storageless():
        return bitsandbytes.nn.Params4bit(data, **settings | NF4)
    p = nn.Parameter(data, requires_grad=False)
    p.quant_state, p.quant_type, p.compress_statistics = None, NF4["quant_type"], True
    return p


def packed(values: Tensor) -> nn.Parameter:
    """Return ``values`` in 4 bits, on their device."""
    whole = parameter(values)
    if not initial.storageless():
        return whole.to(values.device)  # the move packs
    # The library caches a table of codes; one without storage must not stay in the cache.
    with mock.patch.dict(bitsandbytes.functional.name2qmap, clear=True):
        codes, state = bitsandbytes.functional.quantize_4bit(
            values, compress_statistics=True, quant_type=whole.quant_type
        )
    p = parameter(codes)
    p.quant_state = state
    return p


def pack(linear: nn.Linear) -> Packed:
    """Return ``linear`` with its weight in 4 bits; a weight without a value is packed when it is
    drawn.

    The bias is kept.
    """
    ours = mock.patch.object(bitsandbytes.nn.modules, "Params4bit", parameter)
    with initial.valueless(), ours if initial.storageless() else contextlib.nullcontext():
        layer = Packed(linear.in_features, linear.out_features, quant_type="nf4")
    if initial.pending(linear.weight) is None:
        layer.weight = packed(linear.weight.data)
    else:
        layer.weight = parameter(linear.weight.data)
        initial.hand_on(linear.weight, layer.weight, keep=packed)
    layer.bias = linear.bias
    layer.requires_grad_(False)
    return layer


def quantize(module: nn.Module, names: Iterable[str]) -> None:
    """Replace the named linear layers by 4-bit ones."""
    for name in names:
        module.set_submodule(name, pack(module.get_submodule(name)))


def unpacked(module: nn.Module) -> tuple[str, ...]:
    """Return the names of linear layers stored in full that diffusers would pack.

    These exclude adapters, and layers that the model's class keeps in float32. Source: diffusers
    0.40, quantizers/bitsandbytes/utils.py (_replace_with_bnb_linear) and bnb_quantizer.py, which
    skips ``_keep_in_fp32_modules``.
    """
    kept = getattr(module, "_keep_in_fp32_modules", None) or ()
    return tuple(
        name
        for name, part in module.named_modules()
        if type(part) is nn.Linear and "lora_" not in name and not _names(kept, name)
    )


def _names(keys: Iterable[str], name: str) -> bool:
    """Return whether one of ``keys`` is a layer's name, its last word, or a module around the
    layer."""
    last = name.rpartition(".")[2]
    return any(key in (name, last) or f"{key}." in name for key in keys)


def packed_facts(module: nn.Module) -> dict[str, Any]:
    """Check the bytes of packed weights against their elements, and return this rank's bytes.

    Scales are whole on every rank.
    """
    weights = [p for p in module.parameters() if getattr(p, "quant_state", None) is not None]
    demand(bool(weights), "no layer holds packed weights")
    elements = sum(w.quant_state.shape.numel() for w in weights)
    packed_bytes = sum(w.numel() * w.element_size() for w in weights)
    demand(packed_bytes * 2 == elements, f"{packed_bytes} bytes hold {elements} elements")
    kinds = {w.quant_state.quant_type for w in weights}
    demand(kinds == {"nf4"}, f"the weights are packed as {kinds}")
    # One scale per block of 64, itself quantized to a byte.
    scales = sum(w.quant_state.absmax.nbytes for w in weights)
    here = bytes_of(part for w in weights for part in stored(w.data) if part.numel())
    return {
        "packed_layers": len(weights),
        "packed_elements": elements,
        "packed_bytes": packed_bytes,
        "packed_bytes_here": here,
        "scale_bytes": scales,
    }
