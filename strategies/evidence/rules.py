"""Rules for evidence: optimizer updates, labels of settings, Muon's update, and facts from all
ranks.

An update is compared with the optimizer's rule under the expected settings, which shows that these
settings acted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from strategies.base import NotInForce, Settings, demand

if TYPE_CHECKING:
    import torch

    from strategies.engine import TrainingRun


# ---- optimizer updates ----


SAMPLE = 4096
"""Elements of a tensor that are copied, unless all of it is requested."""


class Update(NamedTuple):
    """Copies of a tensor ("weight"), its gradient ("grad") and its state, before and after one
    step.

    State tensors have the optimizer's own names.
    """

    before: dict[str, Any]
    after: dict[str, Any]


def of_its_shape(state: dict[str, Any], p: Any) -> dict[str, Any]:
    """Return the tensors of a state that have the parameter's shape, by their names."""
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
    """Yield a list that gets the first update of the first ``chosen`` tensor with a dense gradient.

    It has the tensor's first elements, or all (``whole``), and the state as ``read`` returns it.
    The list stays empty if the optimizer has no hooks or takes no step.
    """
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
    """Return this rank's share of a DTensor; any other tensor unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def _put_together(tensor: Any) -> Any:
    """Return a copy of the whole tensor; for a DTensor every rank takes part."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference relative to the norm of ``wanted``."""
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def adamw_error(update: Update, settings: Settings) -> float:
    """Return the largest relative error of weight and moments against AdamW's rule in float64.

    A unit in the last place of the weight is no error.
    """
    moved, first, second = _adamw(update, settings)
    moments = (("exp_avg", first), ("exp_avg_sq", second))
    return max(
        weight_error(update, moved), *(relative_error(update.after[n], w) for n, w in moments)
    )


def adamw_weight_error(update: Update, settings: Settings) -> float:
    """Return the same of the weight only, for moments that are quantized after the weight's
    update."""
    return weight_error(update, _adamw(update, settings)[0])


def _adamw(update: Update, settings: Settings) -> tuple[Any, Any, Any]:
    """Return AdamW's update of the weight, and both moments after the step, in float64."""
    beta1, beta2 = settings.betas
    was, step = doubles(update.before), update.after["step"]
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
    """Share of AdamW's update that a 16-bit weight took in one step, over all elements.

    ``chance``: one standard deviation of that share by stochastic rounding.
    """

    share: float
    chance: float


def taken(update: Update, settings: Settings) -> Taken:
    """Return the share of AdamW's update that the weight took; 1 if rounding lost nothing.

    Lost parts return on average (stochastic rounding), or are in ``carried`` (a compensated sum).
    Rounding to nearest takes almost none of small updates.
    """
    import torch

    moved, was, now = _adamw(update, settings)[0], doubles(update.before), doubles(update.after)
    carried = [side.get("carried", 0 * moved) for side in (was, now)]
    went = now["weight"] - was["weight"] + carried[1] - carried[0]
    size = float(moved.square().sum().clamp_min(1e-30))
    if "carried" in now:
        return Taken(float((went * moved).sum()) / size, 0.0)
    # Stochastic rounding has a standard deviation of at most half a unit.
    half = torch.finfo(update.before["weight"].dtype).eps * was["weight"].abs() / 2
    chance = float((half * moved).square().sum().sqrt()) / size
    return Taken(float((went * moved).sum()) / size, chance)


def adafactor_error(update: Update, settings: Settings) -> float:
    """Return the relative error of a whole matrix against ``torch.optim.Adafactor``'s rule in
    float64.

    Its defaults: Shazeer and Stern 2018 (arXiv:1804.04235), algorithm 4 without a first moment.
    """
    import torch

    was, step = doubles(update.before), update.after["step"]
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
    return weight_error(update, moved - settings.learning_rate * settings.weight_decay * weight)


def sgd_error(update: Update, settings: Settings, momentum: float) -> float:
    """Return the same for SGD with ``momentum``."""
    was = doubles(update.before)
    wanted = was["grad"] + settings.weight_decay * was["weight"]
    if not momentum:
        return weight_error(update, -settings.learning_rate * wanted)
    wanted = momentum * was.get("momentum_buffer", 0 * wanted) + wanted
    kept = relative_error(update.after["momentum_buffer"], wanted)
    return max(weight_error(update, -settings.learning_rate * wanted), kept)


def is_matrix(p: Any) -> bool:
    """Return whether a parameter has rows and columns."""
    return p.ndim == 2


def doubles(side: dict[str, Any]) -> dict[str, Any]:
    """Return one side of an update in float64."""
    return {name: v if isinstance(v, float) else v.double() for name, v in side.items()}


def weight_error(update: Update, moved: torch.Tensor) -> float:
    """Return the relative error of the weight after the step, which should have ``moved`` it."""
    import torch

    weight = update.before["weight"]
    off = (update.after["weight"].double() - weight.double() - moved).abs()
    ulp = torch.finfo(weight.dtype).eps * weight.double().abs()
    return float((off - 2 * ulp).clamp_min(0).norm() / moved.norm().clamp_min(1e-30))


# ---- settings among facts ----
# Some facts can only be read where they were set: a library's flag, or a tensor's device if host
# and device are one memory. The facts list them by name under ``SETTINGS``; all others are read
# from the training's effects.


SETTINGS = "settings_not_effects"
"""Fact that lists which of the others are settings."""
WORDS = "setting, not effect"


def label(facts: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return ``facts`` with the named entries, if present, marked as settings rather than effects.

    Raises:
        KeyError: none of the names is present.
    """
    known = [name for name in names if name in facts]
    if not known:
        raise KeyError(f"none of {', '.join(names)} is among the facts {', '.join(facts)}")
    return {**facts, SETTINGS: sorted({*facts.get(SETTINGS, ()), *known})}


def settings(facts: Mapping[str, Any]) -> list[str]:
    """Return the names of the facts that are settings."""
    return list(facts.get(SETTINGS, ()))


def effects(facts: Mapping[str, Any]) -> list[str]:
    """Return the names of the facts that show an effect."""
    return [name for name in facts if name != SETTINGS and name not in settings(facts)]


def worded(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``facts`` for a reader, with each setting marked after its name."""
    mine = settings(facts)
    named = ((f"{k} ({WORDS})" if k in mine else k, v) for k, v in facts.items())
    return {name: value for name, value in named if name != SETTINGS}


# ---- Muon's update ----


SCALE = 0.2
"""Factor of match_rms_adamw: an orthogonal matrix is scaled to the size of AdamW's update."""
NEAR_ONE = (0.5, 1.5)
LIFTED, MOST = 0.01, 0.9
"""Newton-Schulz iteration maps singular values to between 0.5 and 1.5: in five rounds all
those above a hundredth of the matrix's norm, since it multiplies small ones by 3.4 a round."""


def orthogonal(update: Update, settings: Settings, momentum: float) -> dict[str, Any]:
    """Check a matrix's update: the momentum by Muon's rule, and singular values near one.

    The latter in every direction that the momentum has.
    """
    was, now = update
    kept = was["momentum_buffer"].double().lerp(was["grad"].double(), 1 - momentum)
    off = relative_error(now["momentum_buffer"], kept)
    demand(off <= 0.01, f"the momentum differs from Muon's rule by {off:.2g} (relative)")
    size = settings.learning_rate * SCALE * max(kept.shape) ** 0.5
    weight = (1 - settings.learning_rate * settings.weight_decay) * was["weight"].double()
    # Muon orthogonalizes Nesterov's momentum: the gradient interpolated towards it once more.
    given = spectrum(was["grad"].double().lerp(kept, momentum))
    found = spectrum((weight - now["weight"].double()) / size)
    directions = int((given >= LIFTED * given.norm()).sum())
    near = int(((found >= NEAR_ONE[0]) & (found <= NEAR_ONE[1])).sum())
    demand(
        near >= MOST * directions and directions > 1,
        f"{near} of {directions} singular values of an update are near one",
    )
    return {
        "update_directions": directions,
        "singular_values_near_one": near,
        "momentum_error": float(f"{off:.2g}"),
    }


def spectrum(matrix: Any) -> Any:
    """Return the singular values, the largest first."""
    import torch

    return torch.linalg.svdvals(matrix)


# ---- agreement between ranks ----
# A fault that one rank finds is sent to all before their next collective. Otherwise the others
# would wait in it until the process group times out.


UNREAD = (AttributeError, KeyError, IndexError)
"""Errors from reading a library's objects whose attributes have other names now."""


def together(trained: TrainingRun, *looks: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the facts of all ``looks``; after each, the ranks exchange their faults.

    A look that communicates does so before it demands anything of its own rank.

    Raises:
        NotInForce: a rank found a fault; every rank raises it.
    """
    facts: dict[str, Any] = {}
    for look in looks:
        found, fault = _looked(look)
        told = _everyone(trained, fault)
        demand(not any(told), _said(told))
        facts |= found
    return facts


def _said(told: list[str]) -> str:
    """Return each fault once, with the first rank that found it; a fault of all ranks without a
    rank."""
    if len(set(told)) == 1:
        return told[0]
    return "; ".join(f"rank {told.index(text)}: {text}" for text in dict.fromkeys(told) if text)


def _looked(look: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], str]:
    try:
        return look(), ""
    except NotInForce as error:
        return {}, str(error)
    except UNREAD as error:
        return {}, f"could not be read back ({type(error).__name__}: {error})"


def seen_by_one(trained: TrainingRun, look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the facts of one look that only some ranks have: those of the first such rank."""
    found = together(trained, look)
    return next((facts for facts in _everyone(trained, found) if facts), {})


def _everyone(trained: TrainingRun, value: Any) -> list[Any]:
    """Return ``value`` of every rank; in a simulated world only this rank's."""
    import torch.distributed as dist

    if trained.accelerator.num_processes == 1 or trained.launch.simulated:
        return [value]
    told = [None] * trained.accelerator.num_processes
    dist.all_gather_object(told, value)
    return told
