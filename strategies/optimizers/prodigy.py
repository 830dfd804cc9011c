"""prodigy: AdamW that estimates its learning rate, by prodigyopt."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Settings, Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence import rules, states
from strategies.strategy import Strategy

OFF = 0.01
"""Largest relative error of an update and its moments against Prodigy's rule in float64.

Moments in bfloat16 round by 0.4 %.
"""


@dataclass(frozen=True, kw_only=True)
class Prodigy(Strategy):
    """AdamW that estimates its own learning rate.

    The spec's learning rate is not used. The estimate starts at ``d0`` and grows with the distance
    from the first weights. That takes a copy of these and a sum of gradients, of every ``slice``-th
    element. Warm-up safeguard and bias correction are on, as its authors advise for diffusion.
    """

    name: ClassVar[str] = "prodigy"
    slot: ClassVar[Slot] = Slot.OPTIMIZE
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("update",)
    source: ClassVar[str] = "Mishchenko and Defazio 2023, Prodigy (arXiv:2306.06101); prodigyopt"
    needs: ClassVar[tuple[str, ...]] = ("prodigyopt",)

    d0: float = 1e-6
    slice: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.slice, int) or self.slice < 1:
            raise ValueError(f"slice is {self.slice!r}; a whole number from 1, such as 11")
        if not self.d0 > 0:
            raise ValueError(f"d0 is {self.d0!r}; above 0, such as 1e-6")

    def traits(self) -> frozenset[str]:
        return frozenset({"own_state", "whole_gradients"})

    def refuses(self, launch: RunContext) -> str | None:
        if "flat_weights" in launch.traits:
            return (
                "its rate follows from sums over all weights, and prodigyopt adds up one rank's "
                "part; use ddp or single"
            )
        if "dtensor_weights" in launch.traits:
            return "it flattens weights, which unevenly sharded DTensors refuse; use ddp or single"
        return None

    def make_optimizer(self, params: list[Any], settings: Settings, launch: RunContext) -> Any:
        from prodigyopt import Prodigy as Library

        return Library(params, **self._given(settings))

    def _given(self, settings: Settings) -> dict[str, Any]:
        own = {"lr": 1.0, "use_bias_correction": True, "safeguard_warmup": True}
        return settings.adam | own | {"d0": self.d0, "slice_p": self.slice}

    def observe(self, trained: TrainingRun) -> AbstractContextManager[Any]:
        import torch

        optimizer = trained.inner_optimizer

        def read(state: dict[str, Any], p: Any) -> dict[str, Any]:
            kept = {k: state[k] for k in ("exp_avg", "exp_avg_sq") if k in state}
            rate = optimizer.param_groups[0].get("d", 0.0)
            return kept | {"d": torch.tensor(rate, dtype=torch.float64, device=p.device)}

        return rules.watch(optimizer, read=read)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        optimizer, settings = trained.inner_optimizer, trained.settings
        kind = type(optimizer).__name__
        demand(kind == "Prodigy", f"the optimizer is {kind}, expected Prodigy")
        states.agree(trained, **self._given(settings))
        steps = states.steps(trained)
        group = optimizer.param_groups[0]
        sums = sum(float(s["s"].abs().sum()) for s in optimizer.state.values())
        off = abs(group["d_denom"] - sums) / max(sums, 1e-30)
        demand(off <= OFF, f"the estimate's denominator differs from its sums by {off:.2g}")
        estimate = group["d_numerator"] / group["d_denom"]
        least = max(self.d0, estimate * (1 - OFF))
        rate = group["d"]
        demand(rate >= least, f"the learning rate is {rate:.3g}, expected {least:.3g} or more")
        sizes = {p: -(-p.numel() // self.slice) for p in optimizer.state}
        kept = all(s["s"].numel() == sizes[p] for p, s in optimizer.state.items())
        demand(kept, f"the sums are not of every element in {self.slice}")
        facts = {
            "class": kind,
            "steps": steps,
            "learning_rate": float(f"{rate:.3g}"),
            "state_bytes_per_element": round(states.per_element(trained), 3),
        }
        for update in self.note(trained) or ():
            error = prodigy_error(update, settings)
            demand(error <= OFF, f"an update differs from Prodigy's rule by {error:.2g} (relative)")
            facts["update_error"] = float(f"{error:.2g}")
        return facts


def prodigy_error(update: rules.Update, settings: Settings) -> float:
    """Return the largest relative error of weight and moments against Prodigy's rule in float64.

    Both moments are scaled by the estimate ``d`` before the step. Source: Mishchenko and Defazio
    2023, algorithm 4; prodigyopt 1.1.2.
    """
    was = rules.doubles(update.before)
    (beta1, beta2), step, d = settings.betas, update.after["step"], was["d"]
    gradient = d * was["grad"]
    zero = 0 * gradient
    first = was.get("exp_avg", zero).lerp(gradient, 1 - beta1)
    second = was.get("exp_avg_sq", zero).lerp(gradient.square(), 1 - beta2)
    rate = d * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    scale = second.sqrt() + update.after["d"].double() * settings.eps
    moved = -rate * (first / scale + settings.weight_decay * was["weight"])
    moments = (("exp_avg", first), ("exp_avg_sq", second))
    found = (rules.relative_error(update.after[n], w) for n, w in moments)
    return max(rules.weight_error(update, moved), *found)
