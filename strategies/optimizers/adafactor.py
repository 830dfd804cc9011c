"""Adafactor: second moments kept as a row and a column for each matrix."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Settings, Slot, demand
from strategies.engine import Launch, Trained
from strategies.evidence import rules, states, updates
from strategies.strategy import Strategy

__all__ = ["Adafactor"]

OFF = 1e-3
"""From Adafactor's rule in float64, of an update: float32 rounds by some 1e-6."""


@dataclass(frozen=True, kw_only=True)
class Adafactor(Strategy):
    """No first moment, and the second as the outer product of a row and a column a matrix."""

    name: ClassVar[str] = "adafactor"
    slot: ClassVar[Slot] = Slot.OPTIMIZE
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("update",)
    source: ClassVar[str] = "Shazeer and Stern 2018 (arXiv:1804.04235); torch.optim.Adafactor"

    def traits(self) -> frozenset[str]:
        return frozenset({"own_state"})

    def refuses(self, launch: Launch) -> str | None:
        if "flat_weights" in launch.traits:
            return "flat shards have no rows and columns to factor; use ddp or single"
        if "dtensor_weights" in launch.traits:
            return "torch's Adafactor cannot factor DTensors in place; use ddp or single"
        return None

    def make_optimizer(self, params: list[Any], settings: Settings, launch: Launch) -> Any:
        import torch

        return torch.optim.Adafactor(
            params, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )

    def observe(self, trained: Trained) -> AbstractContextManager[Any]:
        """One matrix, whole: its statistics are of rows and columns."""
        return updates.watch(trained.inner_optimizer, _is_matrix, whole=True, read=_factors)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        optimizer, settings = trained.inner_optimizer, trained.settings
        kind = type(optimizer).__name__
        demand(kind == "Adafactor", f"the optimizer is {kind}, not Adafactor")
        states.agree(trained, lr=settings.learning_rate, weight_decay=settings.weight_decay)
        matrices = [(p, s) for p, s in optimizer.state.items() if p.ndim == 2]
        demand(bool(matrices), "the optimizer holds no state of a matrix")
        for p, state in matrices:
            kept = state["row_var"].numel() + state["col_var"].numel()
            demand(kept == sum(p.shape), f"{kept} numbers kept of a matrix of {tuple(p.shape)}")
            demand("exp_avg" not in state, "a first moment is kept")
        facts = {
            "class": kind,
            "steps": states.steps(trained),
            "factored": len(matrices),
            "state_bytes_per_element": round(states.per_element(trained), 3),
        }
        for update in self.note(trained) or ():
            error = rules.adafactor_error(update, settings)
            demand(error <= OFF, f"an update is {error:.2g} of itself away from Adafactor's rule")
            facts["update_error"] = float(f"{error:.2g}")
        return facts


def _is_matrix(p: Any) -> bool:
    return p.ndim == 2


def _factors(state: dict[str, Any], p: Any) -> dict[str, Any]:
    return {name: state[name] for name in ("row_var", "col_var") if name in state}
