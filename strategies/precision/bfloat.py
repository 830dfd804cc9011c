"""bfloat16 weights, with a float32 master (bf16_master) or without (bf16_pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence.rules import label
from strategies.precision.mixed import Bf16, typed
from strategies.subject import Subject
from strategies.workloads import TRAIN


@dataclass(frozen=True, kw_only=True)
class Bf16Master(Bf16):
    """bfloat16 weights with DeepSpeed's float32 master copy.

    Gradients are bfloat16, and updates go through the master copy, which ZeRO shards. It is refused
    if the engine keeps no master copy: autocast over float32 weights is ``bf16``.
    """

    name: ClassVar[str] = "bf16_master"
    workloads: ClassVar[tuple[str, ...]] = (TRAIN,)
    source: ClassVar[str] = "Micikevicius et al. 2018 (arXiv:1710.03740), 3.1; DeepSpeed's bf16"

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        kept = "float_master" in trained.launch.traits
        demand(kept, "the engine keeps no float32 master of 16-bit weights")
        return super().evidence(trained)


@dataclass(frozen=True, kw_only=True)
class Bf16Pure(Bf16):
    """Weights, gradients, optimizer state all in bfloat16.

    There is no float32 master of them.

    The average of the weights (``ema``) stays float32, which takes 4 of the 12 bytes a parameter
    that are left. ``ema:place=none`` removes it. A plain optimizer loses every update below half a
    unit in the last of 8 bits. ``adamw_bf16`` writes with stochastic rounding or a compensated sum.
    ``autocast`` computes norms and sums in float32 and keeps more activations. Public trainers do
    so if they cast their weights and leave accelerate's mixed precision on.
    """

    name: ClassVar[str] = "bf16_pure"
    alters: ClassVar[tuple[str, ...]] = ("rounding", "update")
    source: ClassVar[str] = "Zamirai et al. 2020, Revisiting BFloat16 Training (arXiv:2010.06192)"

    autocast: bool = False

    def traits(self) -> frozenset[str]:
        return frozenset({"half_compute", "pure_bf16"})

    def accelerator_kwargs(self, launch: RunContext) -> dict[str, Any]:
        told = self.autocast or self._told(launch)
        return {"mixed_precision": "bf16" if told else "no"}

    @staticmethod
    def _told(launch: RunContext) -> bool:
        """Return whether DeepSpeed must be configured to keep all its tensors in bfloat16.

        DeepSpeed then casts float32 adapters too, and without this setting casts nothing (0.19.8,
        runtime/engine.py, ``_configure_distributed_model``).
        """
        return "float_master" in launch.traits and "float_adapters" not in launch.traits

    def configure(self, accelerator: Any, module: Any, launch: RunContext) -> None:
        if self._told(launch):
            launch.engine.sixteen_bits(accelerator, master=False)

    def edit_model(self, module: Any, subject: Subject) -> None:
        import torch

        from strategies import initial

        initial.cast(module, torch.bfloat16)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        adapters = "float32" if "float_adapters" in trained.launch.traits else "bfloat16"
        stored = "+".join(sorted({"bfloat16", adapters}))
        types = typed(trained, "bfloat16", stored, adapters)
        moments = types["moments"]
        demand(moments in (adapters, ""), f"moments are {moments}, expected {adapters}")
        if "float_master" in trained.launch.traits:
            return types
        mixed = trained.accelerator.mixed_precision == "bf16"
        demand(mixed == self.autocast, f"accelerate's autocast is {'on' if mixed else 'off'}")
        return label({**types, "autocast": mixed}, "autocast")
