"""Linear layers whose weights are stored in bitsandbytes' 4-bit NormalFloat.

Imports torch and bitsandbytes: import it only where both are there.
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
from strategies.evidence.stored import bytes_of, stored
from strategies.precision.autocast import autocast_dtype

__all__ = ["Packed", "packed_facts", "quantize", "unpacked"]

NF4 = {"requires_grad": False, "quant_type": "nf4"}


class Packed(bitsandbytes.nn.Linear4bit):
    """bitsandbytes' layer, in the type of autocast where that is on.

    Its own forward knows no autocast, and rounds its bias to the input's type for good.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(autocast_dtype(x) or x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        # Gathered codes (FSDP2) are bytes alone: the layer has the rest.
        state = getattr(self.weight, "quant_state", self.quant_state)
        return bitsandbytes.matmul_4bit(x, self.weight, state, bias=bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Codes and bias alone: the scales come from the first weights, which are built again,
        and loading knows no key for them."""
        nn.Linear._save_to_state_dict(self, destination, prefix, keep_vars)


def parameter(data: Tensor, **settings: Any) -> nn.Parameter:
    """bitsandbytes' parameter of ``data`` in nf4, not packed yet. Its class wants a storage: where
    there is none (a prediction) another parameter has what its readers ask for."""
    if not initial.storageless():
        return bitsandbytes.nn.Params4bit(data, **settings | NF4)
    p = nn.Parameter(data, requires_grad=False)
    p.quant_state, p.quant_type, p.compress_statistics = None, NF4["quant_type"], True
    return p


def packed(values: Tensor) -> nn.Parameter:
    """``values`` in 4 bits, where they are."""
    whole = parameter(values)
    if not initial.storageless():
        return whole.to(values.device)  # the move is what packs
    # The library keeps a table of codes for good, and one without storage is of no use later.
    with mock.patch.dict(bitsandbytes.functional.name2qmap, clear=True):
        codes, state = bitsandbytes.functional.quantize_4bit(
            values, compress_statistics=True, quant_type=whole.quant_type
        )
    p = parameter(codes)
    p.quant_state = state
    return p


def pack(linear: nn.Linear) -> Packed:
    """``linear`` with its weight in 4 bits, packed as it is drawn where it has no value yet; its
    bias stays."""
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
    """Replace the linear layers of these names."""
    for name in names:
        module.set_submodule(name, pack(module.get_submodule(name)))


def unpacked(module: nn.Module) -> tuple[str, ...]:
    """Names of the linear layers that are stored in full and that diffusers would pack: no
    adapters, and no layers that the model's class keeps in float32.

    Source: diffusers 0.40, quantizers/bitsandbytes/utils.py (_replace_with_bnb_linear) and
    bnb_quantizer.py, which skips ``_keep_in_fp32_modules``.
    """
    kept = getattr(module, "_keep_in_fp32_modules", None) or ()
    return tuple(
        name
        for name, part in module.named_modules()
        if type(part) is nn.Linear and "lora_" not in name and not _names(kept, name)
    )


def _names(keys: Iterable[str], name: str) -> bool:
    """Whether one of ``keys`` is a layer's name, its last word, or a module around the layer."""
    last = name.rpartition(".")[2]
    return any(key in (name, last) or f"{key}." in name for key in keys)


def packed_facts(module: nn.Module) -> dict[str, Any]:
    """Bytes of the packed weights against the elements they stand for, and how many this rank has
    of them; the scales are whole on every rank."""
    weights = [p for p in module.parameters() if getattr(p, "quant_state", None) is not None]
    demand(bool(weights), "no layer holds packed weights")
    elements = sum(w.quant_state.shape.numel() for w in weights)
    packed_bytes = sum(w.numel() * w.element_size() for w in weights)
    demand(packed_bytes * 2 == elements, f"{packed_bytes} bytes hold {elements} elements")
    kinds = {w.quant_state.quant_type for w in weights}
    demand(kinds == {"nf4"}, f"the weights are packed as {kinds}")
    # One scale a block of 64, itself packed into a byte.
    scales = sum(w.quant_state.absmax.nbytes for w in weights)
    here = bytes_of(part for w in weights for part in stored(w.data) if part.numel())
    return {
        "packed_layers": len(weights),
        "packed_elements": elements,
        "packed_bytes": packed_bytes,
        "packed_bytes_here": here,
        "scale_bytes": scales,
    }
