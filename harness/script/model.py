"""The model that a script prepares: its blocks, frozen layers, and other models beside it."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from strategies.evidence.readings import stored

NOT_BLOCKS = ("Embed", "Norm", "Resnet")
"""Parts of class names in ``_no_split_modules`` that are no blocks of a transformer."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DDP, DeepSpeed's engine and a compiled module."""
    while True:
        if (
            isinstance(model, nn.parallel.DistributedDataParallel)
            or type(model).__name__ == "DeepSpeedEngine"
        ):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def wrapper_of(model: nn.Module) -> nn.Module:
    """Return the DDP of this process that wraps a model; itself if there is none."""
    kind = nn.parallel.DistributedDataParallel
    around = (m for m in _objects() if isinstance(m, kind) and m.module is model)
    return next(around, model)


# ---- blocks ----


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the blocks that a model names, else those of its lists; itself if it has none."""
    for name in ("_repeated_blocks", "_no_split_modules"):
        for part in module.modules():
            others = NOT_BLOCKS if name == "_no_split_modules" else ()
            kinds = getattr(part, name, None) or ()
            named = {kind for kind in kinds if not any(word in kind for word in others)}
            found = _outermost(module, named) if named else []
            if len(found) > 1:
                return found
    return _listed(module) or [module]


def _outermost(module: nn.Module, kinds: set[str]) -> list[nn.Module]:
    """Return the modules of these classes, without those inside another one."""
    found: list[nn.Module] = []
    for child in module.children():
        if type(child).__name__ in kinds:
            found.append(child)
        else:
            found += _outermost(child, kinds)
    return found


def _listed(module: nn.Module) -> list[nn.Module]:
    """Return the members of the outermost lists of alike modules with children."""
    found: list[nn.Module] = []
    for child in module.children():
        members = list(child) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        alike = len(members) > 1 and len({type(m) for m in members}) == 1
        if alike and any(True for _ in members[0].children()):
            found += members
        else:
            found += _listed(child)
    return found


def frozen_linears(module: nn.Module, blocks: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return the names of the blocks' plain linear layers whose weight takes no gradient."""
    inside = {id(m) for block in blocks for m in block.modules()}
    return tuple(
        name
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear and not layer.weight.requires_grad and id(layer) in inside
    )


# ---- optimizers ----


class Joined:
    """Several optimizers, read as one."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.members = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of all of them."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """State of all of them."""
        return {key: value for member in self.members for key, value in member.state.items()}


# ---- other models ----


@dataclass
class Census:
    """Tensors of models beside the trained one.

    ``by_owner``: class of the outermost module -> bytes. ``averages``: copies of the trained
    weights that an EMA keeps.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    averages: list[torch.Tensor] = field(default_factory=list)
    by_owner: dict[str, int] = field(default_factory=dict)


def is_average(thing: Any) -> bool:
    """Return whether an object is an EMA of weights, of diffusers or of torch."""
    kinds = [kind.__name__ for kind in type(thing).__mro__]
    return "EMAModel" in kinds or "AveragedModel" in kinds


def averages_here() -> list[Any]:
    """Return the EMA objects of this process."""
    return [thing for thing in _objects() if is_average(thing)]


REPLACED = "parameters from before prepare"
"""Owner of whole parameters that a script keeps, for example in a list for its optimizer, after
``prepare`` has put sharded ones in their place."""


def census(trained: Sequence[nn.Module], before: Sequence[weakref.ref[Any]] = ()) -> Census:
    """Find the models of this process that are not ``trained``, with their storages.

    ``before``: the trained models' parameters before ``prepare``.
    """
    found, sizes = Census(), Counter()
    seen: set[int] = set()
    own = {id(m) for model in trained for m in model.modules()}
    for thing in _objects():
        if is_average(thing):
            found.averages += getattr(thing, "shadow_params", None) or list(_tensors(thing))
    seen |= {t.untyped_storage()._cdata for t in found.averages}
    for root in _roots(own):
        for tensor in _tensors(root):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                found.tensors.append(tensor)
                sizes[type(root).__name__] += storage.nbytes()
    for tensor in _replaced(trained, before):
        found.tensors.append(tensor)
        sizes[REPLACED] += tensor.untyped_storage().nbytes()
    found.by_owner = {name: size for name, size in sizes.most_common() if size}
    return found


def _replaced(
    trained: Sequence[nn.Module], before: Sequence[weakref.ref[Any]]
) -> list[torch.Tensor]:
    """Return those of ``before`` that live on, and whose storage no model uses."""
    now = [p for model in trained for p in model.parameters()]
    members = {id(p) for p in now}
    used = {t.untyped_storage()._cdata for p in now for t in stored(p.data)}
    alive = [p for p in (ref() for ref in before) if p is not None and id(p) not in members]
    plain = {t.untyped_storage()._cdata: t for p in alive for t in stored(p.data)}
    return [tensor for place, tensor in plain.items() if place not in used]


def _objects() -> Iterator[Any]:
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance would call a proxy's own code
        if issubclass(kind, nn.Module) or kind.__name__ == "EMAModel":
            yield thing


def _roots(own: set[int]) -> list[nn.Module]:
    """Return the outermost modules that are not of the trained models."""
    modules = [m for m in _objects() if issubclass(type(m), nn.Module) and not is_average(m)]
    members = [vars(module).get("_modules") or {} for module in modules]
    inner = {id(child) for some in members for child in some.values()}
    outer = [m for m in modules if id(m) not in inner]
    return [m for m in outer if not any(id(part) in own for part in m.modules())]


def _tensors(module: Any) -> Iterator[torch.Tensor]:
    for tensor in (*module.parameters(), *module.buffers()):
        yield from stored(tensor.data)
