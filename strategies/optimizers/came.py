"""came: a first moment, and factored second moments of gradients and of their scatter."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Settings, Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence import rules, states
from strategies.strategy import Strategy

BETA3 = 0.9999
EPS = (1e-30, 1e-16)
OFF = 1e-3
"""Largest relative error of an update against CAME's rule in float64; float32 rounds by 1e-6."""
FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col")


@dataclass(frozen=True, kw_only=True)
class Came(Strategy):
    """CAME: a first moment, and two factored second moments.

    One is of gradients, as Adafactor's, and one of the difference between an update and its mean. A
    matrix of m x n keeps mn + 2 (m + n) numbers.
    """

    name: ClassVar[str] = "came"
    slot: ClassVar[Slot] = Slot.OPTIMIZE
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("update",)
    source: ClassVar[str] = "Luo et al. 2023, CAME (arXiv:2307.02047); came_pytorch"
    needs: ClassVar[tuple[str, ...]] = ("came_pytorch",)

    def traits(self) -> frozenset[str]:
        return frozenset({"own_state"})

    def refuses(self, launch: RunContext) -> str | None:
        if "flat_weights" in launch.traits:
            return "flat shards have no rows and columns to factor; use ddp or single"
        if "dtensor_weights" in launch.traits:
            return "came_pytorch adds plain tensors to DTensors, which torch refuses; use ddp"
        if "pure_bf16" in launch.traits and "float_adapters" not in launch.traits:
            return (
                "its state is float32 beside bfloat16 weights, and torch loads it as bfloat16; use "
                "bf16, or adafactor"
            )
        return None

    def make_optimizer(self, params: list[Any], settings: Settings, launch: RunContext) -> Any:
        from came_pytorch.CAME import CAME

        return CAME(params, **_given(settings))

    def observe(self, trained: TrainingRun) -> AbstractContextManager[Any]:
        """Watch one whole matrix, because its statistics are of rows and columns."""
        return rules.watch(trained.inner_optimizer, rules.is_matrix, whole=True, read=_kept)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        optimizer, settings = trained.inner_optimizer, trained.settings
        kind = type(optimizer).__name__
        demand(kind == "CAME", f"the optimizer is {kind}, expected CAME")
        states.agree(trained, **_given(settings))
        matrices = [(p, s) for p, s in optimizer.state.items() if p.ndim == 2]
        demand(bool(matrices), "the optimizer has no state for any matrix")
        for p, state in matrices:
            factors = sum(state[name].numel() for name in FACTORS)
            demand(
                factors == 2 * sum(p.shape),
                f"the factors of {tuple(p.shape)} are {factors} numbers, not {2 * sum(p.shape)}",
            )
        facts = {
            "class": kind,
            "steps": states.steps(trained),
            "factored": len(matrices),
            "state_bytes_per_element": round(states.per_element(trained), 3),
        }
        for update in self.note(trained) or ():
            error = came_error(update, settings)
            demand(error <= OFF, f"an update differs from CAME's rule by {error:.2g} (relative)")
            facts["update_error"] = float(f"{error:.2g}")
        return facts


def _given(settings: Settings) -> dict[str, Any]:
    """Return its keyword arguments: the spec's, and the paper's third beta."""
    given = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    return given | {"betas": (*settings.betas, BETA3), "eps": EPS, "clip_threshold": 1.0}


def _kept(state: dict[str, Any], p: Any) -> dict[str, Any]:
    return {name: state[name] for name in ("exp_avg", *FACTORS) if name in state}


def came_error(update: rules.Update, settings: Settings) -> float:
    """Return the relative error of a whole matrix and its first moment against CAME's rule in
    float64.

    Source: Luo et al. 2023, algorithm 2; came_pytorch 0.1.3.
    """
    was = rules.doubles(update.before)
    weight, gradient = was["weight"], was["grad"]
    beta1, beta2 = settings.betas

    def scale(name: str, squares: Any, beta: float) -> Any:
        """Return one over the root of the factored mean of ``squares``."""
        sides = ((f"{name}_row", -1), (f"{name}_col", -2))
        means = [(squares.mean(dim), key) for key, dim in sides]
        row, column = (was.get(key, 0 * m).lerp(m, 1 - beta) for m, key in means)
        return ((row / row.mean()).unsqueeze(1) * column).rsqrt()

    direction = scale("exp_avg_sq", gradient**2 + EPS[0], beta2) * gradient
    direction = direction / (direction.square().mean().sqrt()).clamp_min(1.0)
    first = was.get("exp_avg", 0 * direction).lerp(direction, 1 - beta1)
    steady = scale("exp_avg_res", (direction - first) ** 2 + EPS[1], BETA3)
    moved = -settings.learning_rate * (steady * first + settings.weight_decay * weight)
    kept = rules.relative_error(update.after["exp_avg"], first)
    return max(kept, rules.weight_error(update, moved))
