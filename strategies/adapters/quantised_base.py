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
from torch import Tensor, nn

from strategies import initial
from strategies.adapters.coded import coded, product
from strategies.base import demand
from strategies.evidence.readings import bytes_of, stored
from strategies.precision.autocast import autocast_dtype


class Coded(nn.Linear):
    """Linear layer with codes as its weight: uint8 [out, in], and ``scale``, float32 [out, 1].

    ``dynamic``: products take int8 operands (``strategies.adapters.coded``).
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
        return product(x, self.weight, self.scale, bias, self.to_type, self.dynamic)


def code(module: nn.Module, names: Iterable[str], to: str, dynamic: bool = False) -> None:
    """Store the weights of the named linear layers in 8 bits; ``dynamic``: see ``Coded``."""
    for name in names:
        module.set_submodule(name, Coded(module.get_submodule(name), to, dynamic))


def coded_facts(module: nn.Module, wanted: int, to: str, more: bool = False) -> dict[str, Any]:
    """Return the bytes that hold the weights of the layers, all and on this rank, without scales.

    ``wanted``: the number of coded layers; ``more``: there may be others.
    """
    layers = [m for m in module.modules() if isinstance(m, Coded) and m.to_type == to]
    enough = len(layers) == wanted or (more and len(layers) > wanted)
    demand(enough, f"{len(layers)} layers are stored as {to}, expected {wanted}")
    elements, size = sum(m.in_features * m.out_features for m in layers), 0
    for m in layers:  # all tensors that the layer references, under any name
        held = (*m._parameters.values(), *m._buffers.values(), *vars(m).values())
        tensors = [value for value in held if isinstance(value, Tensor)]
        size += sum(t.nbytes for t in tensors if t is not m.bias and t is not m.scale)
    demand(size == elements, f"{size} bytes hold {elements} weights")
    here = bytes_of(part for m in layers for part in stored(m.weight.data) if part.numel())
    return {"layers": len(layers), "coded_bytes": size, "coded_bytes_here": here}


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
    layer.weight = initial.kept(linear.weight, packed, hold=parameter)
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

    def is_kept(name: str) -> bool:
        """Return whether the class keeps the layer, its last word, or a module around it."""
        last = name.rpartition(".")[2]
        return any(key in (name, last) or f"{key}." in name for key in kept)

    return tuple(
        name
        for name, part in module.named_modules()
        if type(part) is nn.Linear and "lora_" not in name and not is_kept(name)
    )


def packed_facts(module: nn.Module) -> dict[str, Any]:
    """Return the bytes of packed weights, all and on this rank, without scales."""
    weights = [p for p in module.parameters() if getattr(p, "quant_state", None) is not None]
    demand(bool(weights), "no layer holds packed weights")
    elements = sum(w.quant_state.shape.numel() for w in weights)
    size = sum(w.numel() * w.element_size() for w in weights)
    demand(size * 2 == elements, f"{size} bytes hold {elements} elements")
    here = bytes_of(part for w in weights for part in stored(w.data) if part.numel())
    return {"packed_layers": len(weights), "packed_bytes": size, "packed_bytes_here": here}
