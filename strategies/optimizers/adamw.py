"""torch's AdamW, SGD and Adafactor (adamw, sgd, adafactor), and AdamW for bfloat16 weights
(adamw_bf16)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Settings, Slot, demand, load
from strategies.engine import RunContext, TrainingRun
from strategies.evidence import rules, states
from strategies.strategy import Strategy

KERNELS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "plain": {"foreach": False, "fused": False},
}
OFF = 0.01
"""Largest relative error of an update and its moments against AdamW's rule in float64.

Moments in bfloat16 round by 0.4 %.
"""


@dataclass(frozen=True, kw_only=True)
class AdamW(Strategy):
    """AdamW, in one of torch's three implementations.

    ``impl=fused`` is one kernel, ``foreach`` is multi-tensor operations, and ``plain`` steps tensor
    by tensor. If the launch file offloads the optimizer, the engine's own implementation runs.
    """

    name: ClassVar[str] = "adamw"
    slot: ClassVar[Slot] = Slot.OPTIMIZE
    source: ClassVar[str] = "Loshchilov and Hutter 2019, Decoupled Weight Decay (arXiv:1711.05101)"

    impl: str = "fused"

    def __post_init__(self) -> None:
        if self.impl not in KERNELS:
            raise ValueError(f"impl is {self.impl!r}; one of {', '.join(KERNELS)}")

    def refuses(self, launch: RunContext) -> str | None:
        if "host_optimizer" in launch.traits and self.impl != "fused":
            return (
                f"an offloaded optimizer is the engine's own CPU Adam; leave impl={self.impl} out"
            )
        return None

    def make_optimizer(self, params: list[Any], settings: Settings, launch: RunContext) -> Any:
        import torch

        if "host_optimizer" in launch.traits:
            # accelerate's own replacement would drop betas, eps and the decoupled decay.
            return load(launch.engine.host_adamw)(params, **settings.adam)
        return torch.optim.AdamW(params, **settings.adam, **KERNELS[self.impl])

    def observe(self, trained: TrainingRun) -> AbstractContextManager[Any]:
        return rules.watch(trained.inner_optimizer)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        optimizer = trained.inner_optimizer
        kind, group = type(optimizer).__name__, optimizer.param_groups[0]
        offloaded = "host_optimizer" in trained.launch.traits
        wanted = trained.engine.host_adamw.partition(":")[2] if offloaded else "AdamW"
        demand(kind == wanted, f"the optimizer is {kind}, expected {wanted}")
        states.agree(trained, **trained.settings.adam)
        facts = {"class": kind, "steps": states.steps(trained)}
        for update in self.note(trained) or ():
            error = rules.adamw_error(update, trained.settings)
            demand(error <= OFF, f"an update differs from AdamW's rule by {error:.2g} (relative)")
            facts["update_error"] = float(f"{error:.2g}")
        if offloaded:
            demand(optimizer.adam_w_mode, "weight decay is not decoupled")
            return facts
        for key, value in {"amsgrad": False, **KERNELS[self.impl]}.items():
            demand(group.get(key) is value, f"{key} is {group.get(key)}, expected {value}")
        return {**facts, **self._kernel(trained.ops)}

    def _kernel(self, ops: set[str]) -> dict[str, str]:
        """Return the kernel that the operators of a whole step show, whatever the flags are.

        Nothing without a watched step (a compiled one cannot be watched).
        """
        if not ops:
            return {}
        ran = "fused" if any("_fused_adam" in op for op in ops) else "plain"
        if ran == "plain" and any("_foreach_addcdiv" in op for op in ops):
            ran = "foreach"
        demand(ran == self.impl, f"the step ran the {ran} kernel, expected {self.impl}")
        return {"kernel": ran}


# ---- SGD ----


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

    def refuses(self, launch: RunContext) -> str | None:
        if "host_optimizer" in launch.traits:
            return (
                "the engine offloads its own CPU Adam only; take the same sharding without offload"
            )
        return None

    def make_optimizer(self, params: list[Any], settings: Settings, launch: RunContext) -> Any:
        import torch

        optimizer = torch.optim.SGD(
            params,
            lr=settings.learning_rate,
            momentum=self.momentum,
            weight_decay=settings.weight_decay,
        )
        return states.count_steps(optimizer)

    def observe(self, trained: TrainingRun) -> AbstractContextManager[Any]:
        return rules.watch(trained.inner_optimizer)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        kind = type(trained.inner_optimizer).__name__
        demand(kind == "SGD", f"the optimizer is {kind}, expected SGD")
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
        demand(mean == wanted, f"{mean:.2f} bytes of state for each element, expected {wanted}")
        facts = {
            "class": kind,
            "steps": states.steps(trained),
            "state_bytes_per_element": mean,
        }
        for update in self.note(trained) or ():
            error = rules.sgd_error(update, settings, self.momentum)
            demand(error <= 0.01, f"an update differs from SGD's rule by {error:.2g} (relative)")
            facts["update_error"] = float(f"{error:.2g}")
        return facts


# ---- Adafactor ----


ADAFACTOR_OFF = 1e-3
"""Largest relative error of an update against Adafactor's rule in float64; float32 rounds by
1e-6."""


@dataclass(frozen=True, kw_only=True)
class Adafactor(Strategy):
    """Adafactor: no first moment, and a factored second.

    The second moment is the outer product of a row and a column a matrix.
    """

    name: ClassVar[str] = "adafactor"
    slot: ClassVar[Slot] = Slot.OPTIMIZE
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("update",)
    source: ClassVar[str] = "Shazeer and Stern 2018 (arXiv:1804.04235); torch.optim.Adafactor"

    def traits(self) -> frozenset[str]:
        return frozenset({"own_state"})

    def refuses(self, launch: RunContext) -> str | None:
        if "flat_weights" in launch.traits:
            return "flat shards have no rows and columns to factor; use ddp or single"
        if "dtensor_weights" in launch.traits:
            return "torch's Adafactor cannot factor DTensors in place; use ddp or single"
        return None

    def make_optimizer(self, params: list[Any], settings: Settings, launch: RunContext) -> Any:
        import torch

        return torch.optim.Adafactor(
            params, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )

    def observe(self, trained: TrainingRun) -> AbstractContextManager[Any]:
        """Watch one whole matrix, because its statistics are of rows and columns."""
        return rules.watch(trained.inner_optimizer, rules.is_matrix, whole=True, read=_factors)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        optimizer, settings = trained.inner_optimizer, trained.settings
        kind = type(optimizer).__name__
        demand(kind == "Adafactor", f"the optimizer is {kind}, expected Adafactor")
        states.agree(trained, lr=settings.learning_rate, weight_decay=settings.weight_decay)
        matrices = [(p, s) for p, s in optimizer.state.items() if p.ndim == 2]
        demand(bool(matrices), "the optimizer has no state for any matrix")
        for p, state in matrices:
            kept = state["row_var"].numel() + state["col_var"].numel()
            demand(
                kept == sum(p.shape),
                f"the state of {tuple(p.shape)} has {kept} numbers, expected {sum(p.shape)}",
            )
            demand("exp_avg" not in state, "the optimizer keeps a first moment")
        facts = {
            "class": kind,
            "steps": states.steps(trained),
            "factored": len(matrices),
            "state_bytes_per_element": round(states.per_element(trained), 3),
        }
        for update in self.note(trained) or ():
            error = rules.adafactor_error(update, settings)
            demand(
                error <= ADAFACTOR_OFF,
                f"an update differs from Adafactor's rule by {error:.2g} (relative)",
            )
            facts["update_error"] = float(f"{error:.2g}")
        return facts


def _factors(state: dict[str, Any], p: Any) -> dict[str, Any]:
    return {name: state[name] for name in ("row_var", "col_var") if name in state}


# ---- AdamW for bfloat16 weights ----


DEVIATIONS = 6
"""Tolerance in standard deviations of the share of an update that stochastic rounding applies."""


@dataclass(frozen=True, kw_only=True)
class AdamWBf16(Strategy):
    """Writes bfloat16 weights without losing small updates.

    ``write=stochastic`` rounds up or down at random. ``write=kahan`` carries the lost part to the
    next step.
    """

    name: ClassVar[str] = "adamw_bf16"
    slot: ClassVar[Slot] = Slot.OPTIMIZE
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("update",)
    source: ClassVar[str] = "Zamirai et al. 2020, Revisiting BFloat16 Training (arXiv:2010.06192)"

    write: str = "stochastic"

    def __post_init__(self) -> None:
        if self.write not in ("stochastic", "kahan"):
            raise ValueError(f"write is {self.write!r}; one of stochastic, kahan")

    def refuses(self, launch: RunContext) -> str | None:
        if "pure_bf16" not in launch.traits:
            return "writes bfloat16 weights that have no master; add bf16_pure, or take adamw"
        if "float_adapters" in launch.traits:
            return "what trains is float32, where no update is lost; use adamw, or leave dtype out"
        if "dtensor_weights" in launch.traits:
            return "rounds plain tensors by chance, and DTensors mix with none; use adamw, or ddp"
        if "cut_weights" in launch.traits:
            return "rounds by chance, and what ranks have alike would drift apart; use adamw"
        return None

    def make_optimizer(self, params: list[Any], settings: Settings, launch: RunContext) -> Any:
        from strategies.optimizers.bf16_adamw import Bf16AdamW

        defaults = {**settings.adam, "kahan": self.write == "kahan"}
        return Bf16AdamW(params, defaults)

    def observe(self, trained: TrainingRun) -> AbstractContextManager[Any]:
        return rules.watch(trained.inner_optimizer)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        optimizer = trained.inner_optimizer
        rescued: Any = getattr(optimizer, "rescued", None)
        demand(
            rescued is not None,
            f"the optimizer is {type(optimizer).__name__}, without the recipe's rounding",
        )
        demand(rescued > 0, "every update that plain rounding loses was lost")
        carried = [s["carried"] for s in optimizer.state.values() if "carried" in s]
        demand(
            bool(carried) == (self.write == "kahan"),
            f"{len(carried)} weights have a compensation term",
        )
        kept = sum(int(c.count_nonzero()) for c in carried)
        demand(kept > 0 or self.write != "kahan", "no rounding error is kept for the next step")
        facts = {"rescued_in_first_step": rescued, "carried_elements": kept}
        for update in self.note(trained) or ():
            share, chance = rules.taken(update, trained.settings)
            may = 0.01 + DEVIATIONS * chance
            demand(
                abs(share - 1) <= may,
                f"the weights changed by {share:.2f} of AdamW's update, expected 1",
            )
            facts |= {"update_taken": round(share, 3), "update_taken_within": round(may, 3)}
        return facts
