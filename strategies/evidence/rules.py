"""Optimizers' rules, by which a tensor before an update becomes the one behind it: the settings
that really acted are those under which it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from strategies.evidence.updates import Update, relative_error

if TYPE_CHECKING:
    import torch

    from strategies.base import Settings

__all__ = ["Taken", "adafactor_error", "adamw_error", "adamw_weight_error", "sgd_error", "taken"]


def adamw_error(update: Update, settings: Settings) -> float:
    """How far weight and moments are from AdamW's rule with ``settings``, in float64: the largest
    relative error of the three; a unit in the last place of the weight is no error."""
    moved, first, second = _adamw(update, settings)
    moments = (("exp_avg", first), ("exp_avg_sq", second))
    return max(
        _weight_error(update, moved), *(relative_error(update.after[n], w) for n, w in moments)
    )


def adamw_weight_error(update: Update, settings: Settings) -> float:
    """The same of the weight alone, for moments that are written in fewer bits than they had when
    the weight was moved by them."""
    return _weight_error(update, _adamw(update, settings)[0])


def _adamw(update: Update, settings: Settings) -> tuple[Any, Any, Any]:
    """What AdamW adds to the weight, and both moments behind the step, in float64."""
    beta1, beta2 = settings.betas
    was, step = _doubles(update.before), update.after["step"]
    gradient = was["grad"]
    zero = 0 * gradient
    first = was.get("exp_avg", zero).lerp(gradient, 1 - beta1)
    second = was.get("exp_avg_sq", zero).lerp(gradient.square(), 1 - beta2)
    scale = (second / (1 - beta2**step)).sqrt() + settings.eps
    moved = -settings.learning_rate * (
        first / (1 - beta1**step) / scale + settings.weight_decay * was["weight"]
    )
    return moved, first, second


class Taken(NamedTuple):
    """The share of AdamW's update that a short weight took in one step, over all elements, and by
    how much chance may have moved that share (one standard deviation)."""

    share: float
    chance: float


def taken(update: Update, settings: Settings) -> Taken:
    """1 where rounding lost nothing: what it took was given back on average (rounding by chance),
    or is in ``carried`` (a compensated sum). Plain rounding takes almost none of small updates."""
    import torch

    moved, was, now = _adamw(update, settings)[0], _doubles(update.before), _doubles(update.after)
    carried = [side.get("carried", 0 * moved) for side in (was, now)]
    went = now["weight"] - was["weight"] + carried[1] - carried[0]
    size = float(moved.square().sum().clamp_min(1e-30))
    if "carried" in now:
        return Taken(float((went * moved).sum()) / size, 0.0)
    # Rounding up or down by chance is at most half a unit of deviation.
    half = torch.finfo(update.before["weight"].dtype).eps * was["weight"].abs() / 2
    chance = float((half * moved).square().sum().sqrt()) / size
    return Taken(float((went * moved).sum()) / size, chance)


def adafactor_error(update: Update, settings: Settings) -> float:
    """How far a whole matrix is from ``torch.optim.Adafactor``'s rule with its defaults, in
    float64: Shazeer and Stern 2018 (arXiv:1804.04235), algorithm 4 without a first moment."""
    import torch

    was, step = _doubles(update.before), update.after["step"]
    weight, gradient = was["weight"], was["grad"]
    rate = 1 - step**-0.8
    squares = gradient.square()

    def follow(name: str, found: Any) -> Any:
        return rate * was.get(name, 0 * found) + (1 - rate) * found

    row = follow("row_var", squares.mean(-1, keepdim=True))
    column = follow("col_var", squares.mean(-2, keepdim=True))
    least = torch.finfo(update.before["weight"].dtype).eps
    variance = row @ column / row.mean(-2, keepdim=True).clamp_min(least)
    direction = gradient / variance.clamp_min(least * least).sqrt()
    root = weight.numel() ** 0.5
    size = max(1e-3, float(weight.norm()) / root) * min(settings.learning_rate, step**-0.5)
    moved = -size * direction / max(1.0, float(direction.norm()) / root)
    return _weight_error(update, moved - settings.learning_rate * settings.weight_decay * weight)


def sgd_error(update: Update, settings: Settings, momentum: float) -> float:
    """The same for SGD with ``momentum``."""
    was = _doubles(update.before)
    wanted = was["grad"] + settings.weight_decay * was["weight"]
    if not momentum:
        return _weight_error(update, -settings.learning_rate * wanted)
    wanted = momentum * was.get("momentum_buffer", 0 * wanted) + wanted
    kept = relative_error(update.after["momentum_buffer"], wanted)
    return max(_weight_error(update, -settings.learning_rate * wanted), kept)


def _doubles(side: dict[str, Any]) -> dict[str, Any]:
    return {name: v if isinstance(v, float) else v.double() for name, v in side.items()}


def _weight_error(update: Update, moved: torch.Tensor) -> float:
    import torch

    weight = update.before["weight"]
    off = (update.after["weight"].double() - weight.double() - moved).abs()
    ulp = torch.finfo(weight.dtype).eps * weight.double().abs()
    return float((off - 2 * ulp).clamp_min(0).norm() / moved.norm().clamp_min(1e-30))
