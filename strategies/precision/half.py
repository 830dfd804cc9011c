"""float16 weights and activations, for drawing samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Slot, demand
from strategies.engine import Launch, Trained
from strategies.evidence.types import dtypes, products
from strategies.strategy import Strategy
from strategies.subject import Subject
from strategies.workloads import SAMPLE

__all__ = ["Fp16Pure"]


@dataclass(frozen=True, kw_only=True)
class Fp16Pure(Strategy):
    """Weights and activations in float16: 10 bits of mantissa where bfloat16 has 7, and nothing
    above 65504. For drawing samples: training so loses small gradients.
    """

    name: ClassVar[str] = "fp16_pure"
    slot: ClassVar[Slot] = Slot.PRECISION
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("rounding",)
    unit: ClassVar[float] = 2**-11
    source: ClassVar[str] = "IEEE 754 half precision; torch_dtype=float16 of diffusers' pipelines"
    workloads: ClassVar[tuple[str, ...]] = (SAMPLE,)

    def traits(self) -> frozenset[str]:
        return frozenset({"half_compute"})

    def accelerator_kwargs(self, launch: Launch) -> dict[str, Any]:
        return {"mixed_precision": "no"}

    def edit_model(self, module: Any, subject: Subject) -> None:
        import torch

        from strategies import initial

        initial.cast(module, torch.float16)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        types = dtypes(trained)
        off = {k: types[k] for k in ("compute_dtype", "parameters") if types[k] != "float16"}
        demand(not off, f"not all is float16: {off}")
        return {**types, **products(trained)}
