"""Trained adapters for sampling: read, merged into a model's linear layers, or attached to them.

Imports torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from strategies import initial
from strategies.adapters.lora import inject
from strategies.base import BadInput
from strategies.distillation import files
from strategies.engine import TrainingRun
from strategies.sampling.eight_bits import shown
from strategies.sampling.trained_beside import ENDS, named
from strategies.subject import Subject

SIZE = 0.02
"""Standard deviation of an adapter's elements if no file has them."""


class Pair(NamedTuple):
    """Matrices of one layer's adapter, float32: ``down`` [rank, in] and ``up`` [out, rank].

    Their product is added to the layer's weight.
    """

    down: Tensor
    up: Tensor

    @property
    def product(self) -> Tensor:
        """Product of the two matrices, [out, in]."""
        return self.up @ self.down


def pairs(subject: Subject, file: str, rank: int) -> dict[str, Pair]:
    """Return name of a layer -> its adapter: from ``file``, or drawn with this ``rank``.

    Raises:
        BadInput: the file's adapters are of another model.
    """
    with initial.valueless():
        plain = subject.make()
    if not file:
        return {name: _drawn(plain.get_submodule(name), name, rank) for name in subject.linears}
    shapes = files.shapes(file)
    found = named(shapes)
    for name, ends in found.items():
        layer = dict(plain.named_modules()).get(name)
        mine = layer and (layer.in_features, layer.out_features)
        theirs = shapes[ends[0]][1], shapes[ends[1]][0]
        if mine != theirs:
            raise BadInput(
                f"{file} has an adapter for {name} of {theirs[0]} by {theirs[1]}, and "
                f"{subject.name} has {mine or 'no such layer'}; give its own --model"
            )
    state = _values(subject, file, shapes)
    return {name: Pair(*(state[end].float() for end in ends)) for name, ends in found.items()}


def _values(subject: Subject, file: str, shapes: Mapping[str, Any]) -> Mapping[str, Tensor]:
    if initial.storageless():
        return {name: torch.empty(shape, device="cpu") for name, shape in shapes.items()}
    return subject.load(files.located(file))


def _drawn(layer: nn.Linear, name: str, rank: int) -> Pair:
    chance = initial.keyed(0, f"{name}{ENDS[0]}")
    sizes = (rank, layer.in_features), (layer.out_features, rank)
    return Pair(*(SIZE * torch.randn(size, generator=chance, device="cpu") for size in sizes))


# ---- application and evidence ----


def merge(module: nn.Module, found: Mapping[str, Pair]) -> None:
    """Add each product to its layer's weight, once that has a value.

    The projection of the weight on the product before is kept (``merged_onto``), for the evidence.
    """
    module.merged_onto = {}
    for name, pair in found.items():
        p = module.get_submodule(name).weight
        add = functools.partial(_merged, pair=pair, name=name, onto=module.merged_onto)
        if initial.pending(p) is not None:
            initial.instead(p, add)
        else:
            with torch.no_grad():
                p.copy_(add(p.float()))


def _merged(weight: Tensor, pair: Pair, name: str, onto: dict[str, float]) -> Tensor:
    product = pair.product
    onto[name] = float(weight.flatten() @ product.flatten())
    return weight + product


def put_beside(module: nn.Module, subject: Subject, found: Mapping[str, Pair]) -> None:
    """Attach peft's adapters to these layers, with their values."""
    (rank,) = {len(pair.down) for pair in found.values()}
    inject(module, subject, rank, list(found))
    with torch.no_grad():
        for name, pair in found.items():
            layer = module.get_submodule(name)
            layer.lora_A["default"].weight.copy_(pair.down)
            layer.lora_B["default"].weight.copy_(pair.up)


def share(trained: TrainingRun, name: str, pair: Pair, onto: Mapping[str, float] | None) -> float:
    """Return the share of the adapter in the product of layer ``name``: 1 is all of it.

    ``onto``: projections of merged weights before the merge; None: adapters are attached.
    """
    layer, product = trained.module.get_submodule(name), pair.product.double()
    dtype, width = trained.subject.dtype(trained.module), pair.down.shape[1]
    whole = _along(shown(layer, width, dtype), product)
    base = _along(shown(layer.base_layer, width, dtype), product) if onto is None else onto[name]
    return (whole - base) / float(product.square().sum())


def _along(weight: Tensor, product: Tensor) -> float:
    return float((weight.double().cpu() * product).sum())
