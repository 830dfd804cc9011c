"""One update of one tensor, before and after the optimizer's step of the watched training step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["SAMPLE", "Update", "relative_error", "watch"]

SAMPLE = 4096
"""Elements that are kept of a tensor, where not all of it is asked for."""


class Update(NamedTuple):
    """Copies of a tensor ("weight"), its gradient ("grad") and its state, by the optimizer's own
    names, from before and after one step."""

    before: dict[str, Any]
    after: dict[str, Any]


def of_its_shape(state: dict[str, Any], p: Any) -> dict[str, Any]:
    """The tensors of a state that have the parameter's shape, by their names."""
    import torch

    return {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == p.shape}


@contextlib.contextmanager
def watch(
    optimizer: Any,
    chosen: Callable[[Any], bool] = lambda p: True,
    *,
    whole: bool = False,
    read: Callable[[dict[str, Any], Any], dict[str, Any]] = of_its_shape,
) -> Iterator[list[Update]]:
    """Yield a list that gets the first update, of the first tensor that is ``chosen`` and has a
    dense gradient: its first elements, or ``whole``, and what ``read`` makes of its state. Stays
    empty where the optimizer has no hooks or takes no step."""
    seen: list[Update] = []
    waiting: list[tuple[Any, dict[str, Any]]] = []

    def before(stepped: Any, *_: Any) -> None:
        dense = (
            p
            for group in stepped.param_groups
            for p in group["params"]
            if p.grad is not None and not p.grad.is_sparse and here(p).numel() and chosen(p)
        )
        p = None if waiting or seen else next(dense, None)
        if p is not None:
            waiting.append((p, _copied(p, stepped.state.get(p, {}), whole, read)))

    def after(stepped: Any, *_: Any) -> None:
        if waiting:
            p, was = waiting.pop()
            seen.append(Update(was, _copied(p, stepped.state.get(p, {}), whole, read)))

    hooks = getattr(optimizer, "register_step_pre_hook", None)
    handles = [hooks(before), optimizer.register_step_post_hook(after)] if hooks else []
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _copied(p: Any, state: dict[str, Any], whole: bool, read: Any) -> dict[str, Any]:
    found = {"weight": p.detach(), "grad": p.grad.detach(), **read(state, p)}
    count = {"step": float(state["step"])} if "step" in state else {}
    kept = _put_together if whole else (lambda t: here(t).flatten()[:SAMPLE].clone())
    return {name: kept(tensor) for name, tensor in found.items()} | count


def here(tensor: Any) -> Any:
    """What this rank has of a tensor: of a DTensor its share."""
    return getattr(tensor, "_local_tensor", tensor)


def _put_together(tensor: Any) -> Any:
    """A copy of the whole tensor; of a DTensor every rank takes part."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference, as a share of the norm of what was wanted."""
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))
