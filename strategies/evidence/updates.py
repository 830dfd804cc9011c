"""One update of one tensor, before and after the optimizer's step of the watched training step: the
settings that really acted are those by which the one becomes the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from strategies.base import Settings

__all__ = ["Update", "adamw_error", "relative_error", "sgd_error", "watch"]

SAMPLE = 4096
"""Elements that are kept of a tensor, where not all of it is asked for."""


class Update(NamedTuple):
    """Copies of a tensor ("weight"), its gradient ("grad") and its state, by the optimizer's own
    names, from before and after one step."""

    before: dict[str, Any]
    after: dict[str, Any]


@contextlib.contextmanager
def watch(
    optimizer: Any, chosen: Callable[[Any], bool] = lambda p: True, *, whole: bool = False
) -> Iterator[list[Update]]:
    """Yield a list that gets the first update, of the first tensor that is ``chosen`` and has a
    dense gradient: its first elements, or ``whole``. Stays empty where the optimizer has no hooks
    or takes no step."""
    seen: list[Update] = []
    waiting: list[tuple[Any, dict[str, Any]]] = []

    def before(stepped: Any, *_: Any) -> None:
        dense = (
            p
            for group in stepped.param_groups
            for p in group["params"]
            if p.grad is not None and not p.grad.is_sparse and _here(p).numel() and chosen(p)
        )
        p = None if waiting or seen else next(dense, None)
        if p is not None:
            waiting.append((p, _copied(p, stepped.state.get(p, {}), whole)))

    def after(stepped: Any, *_: Any) -> None:
        if waiting:
            p, was = waiting.pop()
            seen.append(Update(was, _copied(p, stepped.state.get(p, {}), whole)))

    hooks = getattr(optimizer, "register_step_pre_hook", None)
    handles = [hooks(before), optimizer.register_step_post_hook(after)] if hooks else []
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _copied(p: Any, state: dict[str, Any], whole: bool) -> dict[str, Any]:
    import torch

    found = {"weight": p.detach(), "grad": p.grad.detach()}
    found |= {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == p.shape}
    count = {"step": float(state["step"])} if "step" in state else {}
    kept = _put_together if whole else (lambda t: _here(t).flatten()[:SAMPLE].clone())
    return {name: kept(tensor) for name, tensor in found.items()} | count


def _here(tensor: Any) -> Any:
    """What this rank has of a tensor: of a DTensor its share."""
    return getattr(tensor, "_local_tensor", tensor)


def _put_together(tensor: Any) -> Any:
    """A copy of the whole tensor; of a DTensor every rank takes part."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference, as a share of the norm of what was wanted."""
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def adamw_error(update: Update, settings: Settings) -> float:
    """How far weight and moments are from AdamW's rule with ``settings``, in float64: the largest
    relative error of the three; a unit in the last place of the weight is no error."""
    beta1, beta2 = settings.betas
    was = {name: v if isinstance(v, float) else v.double() for name, v in update.before.items()}
    gradient, step = was["grad"], update.after["step"]
    zero = 0 * gradient
    first = was.get("exp_avg", zero).lerp(gradient, 1 - beta1)
    second = was.get("exp_avg_sq", zero).lerp(gradient.square(), 1 - beta2)
    scale = (second / (1 - beta2**step)).sqrt() + settings.eps
    moved = -settings.learning_rate * (
        first / (1 - beta1**step) / scale + settings.weight_decay * was["weight"]
    )
    moments = (("exp_avg", first), ("exp_avg_sq", second))
    return max(
        _weight_error(update, moved), *(relative_error(update.after[n], w) for n, w in moments)
    )


def sgd_error(update: Update, settings: Settings, momentum: float) -> float:
    """The same for SGD with ``momentum``."""
    was = {name: v if isinstance(v, float) else v.double() for name, v in update.before.items()}
    wanted = was["grad"] + settings.weight_decay * was["weight"]
    if not momentum:
        return _weight_error(update, -settings.learning_rate * wanted)
    wanted = momentum * was.get("momentum_buffer", 0 * wanted) + wanted
    kept = relative_error(update.after["momentum_buffer"], wanted)
    return max(_weight_error(update, -settings.learning_rate * wanted), kept)


def _weight_error(update: Update, moved: torch.Tensor) -> float:
    import torch

    weight = update.before["weight"]
    off = (update.after["weight"].double() - weight.double() - moved).abs()
    ulp = torch.finfo(weight.dtype).eps * weight.double().abs()
    return float((off - 2 * ulp).clamp_min(0).norm() / moved.norm().clamp_min(1e-30))
