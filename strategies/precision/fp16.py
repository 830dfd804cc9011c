"""float16: half the exponent of float32, so losses are scaled to keep small gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import demand
from strategies.engine import Launch, Trained
from strategies.evidence.settings import label
from strategies.precision.mixed import Bf16
from strategies.workloads import TRAIN

__all__ = ["Fp16"]

UNSCALED = "_amp_foreach_non_finite_check_and_unscale_"
"""torch's operator that divides gradients by the loss scale."""


@dataclass(frozen=True, kw_only=True)
class Fp16(Bf16):
    """Mixed precision in float16 with a loss scale that adapts: autocast over float32 weights under
    ddp and single, float16 weights with a float32 master under DeepSpeed. ``scale`` is the first
    scale; a step whose gradients overflow is skipped, which voids the row: begin lower then.
    """

    name: ClassVar[str] = "fp16"
    workloads: ClassVar[tuple[str, ...]] = (TRAIN,)
    idle: ClassVar[str] = "there is no loss to scale when samples are drawn; take fp16_pure"
    unit: ClassVar[float] = 2**-11
    source: ClassVar[str] = (
        "Micikevicius et al. 2018 (arXiv:1710.03740); torch.amp.GradScaler, DeepSpeed's fp16"
    )
    needs: ClassVar[tuple[str, ...]] = ("fp16",)

    half: ClassVar[str] = "float16"
    scale: int = 65536

    def __post_init__(self) -> None:
        if not isinstance(self.scale, int) or self.scale < 2 or self.scale & (self.scale - 1):
            raise ValueError(f"scale is {self.scale!r}; a power of two from 2, as 65536")

    def traits(self) -> frozenset[str]:
        return frozenset({"half_compute", "scales_gradients"})

    def accelerator_kwargs(self, launch: Launch) -> dict[str, Any]:
        from accelerate import GradScalerKwargs

        scaler = GradScalerKwargs(init_scale=float(self.scale))
        return {"mixed_precision": "fp16", "kwargs_handlers": [scaler]}

    def configure(self, accelerator: Any, module: Any, launch: Launch) -> None:
        launch.engine.sixteen_bits(accelerator, scale=self.scale)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        facts, scale = super().evidence(trained), trained.engine.told(trained).loss_scale
        demand(scale is not None, "no loss scale is kept")
        demand(scale > 1, f"the loss is scaled by {scale}")
        facts = {**facts, "loss_scale": scale}
        seen = trained.observed.ran if trained.observed else []
        unscaled = any(UNSCALED in ran.name for ran in seen)
        # An engine that scales by itself unscales by plain products, which tell nothing.
        return {**facts, "unscaled_in_step": True} if unscaled else label(facts, "loss_scale")
