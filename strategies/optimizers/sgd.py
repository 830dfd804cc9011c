"""Stochastic gradient descent: at most one moment, at best no optimizer state at all."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Settings, Slot, demand
from strategies.engine import Launch, Trained
from strategies.evidence import rules, states, updates
from strategies.strategy import Strategy

__all__ = ["Sgd"]


@dataclass(frozen=True, kw_only=True)
class Sgd(Strategy):
    """SGD with ``momentum``; at 0 it keeps no state. The learning rate is the spec's."""

    name: ClassVar[str] = "sgd"
    slot: ClassVar[Slot] = Slot.OPTIMIZE
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("update",)
    source: ClassVar[str] = "Robbins and Monro 1951; Sutskever et al. 2013 (momentum); torch.optim"

    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum!r}; from 0 to below 1")

    def traits(self) -> frozenset[str]:
        # With momentum, torch would keep a sparse moment that grows by every batch's rows.
        return frozenset({"own_state"} | ({"takes_sparse"} if self.momentum == 0 else set()))

    def refuses(self, launch: Launch) -> str | None:
        if "host_optimizer" in launch.traits:
            return (
                "the engine offloads its own CPU Adam only; take the same sharding without offload"
            )
        return None

    def make_optimizer(self, params: list[Any], settings: Settings, launch: Launch) -> Any:
        import torch

        optimizer = torch.optim.SGD(
            params,
            lr=settings.learning_rate,
            momentum=self.momentum,
            weight_decay=settings.weight_decay,
        )
        return states.count_steps(optimizer)

    def observe(self, trained: Trained) -> AbstractContextManager[Any]:
        return updates.watch(trained.inner_optimizer)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        kind = type(trained.inner_optimizer).__name__
        demand(kind == "SGD", f"the optimizer is {kind}, not SGD")
        settings = trained.settings
        states.agree(
            trained,
            lr=settings.learning_rate,
            momentum=self.momentum,
            weight_decay=settings.weight_decay,
        )
        mean = states.per_element(trained)
        weights = trained.optimized()
        elements = sum(w.numel() for w in weights)
        itemsize = sum(w.numel() * w.element_size() for w in weights) / elements
        wanted = itemsize if self.momentum else 0.0
        demand(mean == wanted, f"{mean:.2f} bytes of state an element, not {wanted}")
        facts = {
            "class": kind,
            "steps": states.steps(trained),
            "state_bytes_per_element": mean,
        }
        for update in self.note(trained) or ():
            error = rules.sgd_error(update, settings, self.momentum)
            demand(error <= 0.01, f"an update is {error:.2g} of itself away from SGD's rule")
            facts["update_error"] = float(f"{error:.2g}")
        return facts
