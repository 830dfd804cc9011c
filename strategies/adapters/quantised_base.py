"""Linear layers with frozen weights in bitsandbytes' 4-bit NormalFloat.

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
from strategies.base import demand
from strategies.evidence.readings import bytes_of, stored
from strategies.precision.autocast import autocast_dtype

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
    unpacked = parameter(values)
    if not initial.storageless():
        return unpacked.to(values.device)  # the move packs
    # The library caches a table of codes; one without storage must not stay in the cache.
    with mock.patch.dict(bitsandbytes.functional.name2qmap, clear=True):
        codes, state = bitsandbytes.functional.quantize_4bit(
            values, compress_statistics=True, quant_type=unpacked.quant_type
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


def packed_facts(module: nn.Module) -> dict[str, Any]:
    """Return the bytes of packed weights, all and on this rank, without scales."""
    weights = [p for p in module.parameters() if getattr(p, "quant_state", None) is not None]
    demand(bool(weights), "no layer holds packed weights")
    elements = sum(w.quant_state.shape.numel() for w in weights)
    size = sum(w.numel() * w.element_size() for w in weights)
    demand(size * 2 == elements, f"{size} bytes hold {elements} elements")
    here = bytes_of(part for w in weights for part in stored(w.data) if part.numel())
    return {"packed_layers": len(weights), "packed_bytes": size, "packed_bytes_here": here}
