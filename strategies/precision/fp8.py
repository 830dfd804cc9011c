"""fp8: matrix products in float8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence import states
from strategies.precision.mixed import Bf16
from strategies.subject import Subject
from strategies.workloads import TRAIN

SCALINGS = {"tensorwise": "aten::max", "rowwise": "aten::amax"}
"""Parts of a matrix that share a scale -> operator that finds the largest of each."""
MX_BLOCK = 32
"""Neighbors in a row that share a scale in the format MX."""


def float8_layers(trained: TrainingRun, kind: type) -> int:
    """Return the number of float8 layers of class ``kind``; it may exceed the number requested if a
    copy has its own."""
    layers = sum(isinstance(m, kind) for m in trained.module.modules())
    wanted = len(trained.subject.linears)
    demand(layers >= wanted, f"{layers} of {wanted} layers multiply in float8")
    return layers


@dataclass(frozen=True, kw_only=True)
class Fp8(Bf16):
    """The blocks' matrix products in float8, others as bf16.

    Each tensor has a scale. Weights stay in high precision and are cast at each use. ``emulate=on``
    rounds the operands to float8 and multiplies in higher precision: float8's numbers on any
    device, without its speed.

    ``scaling=rowwise`` has a scale for each row of the first operand and each column of the second.
    ``format=mx`` (MXFP8) has one for each 32 neighbors, a power of two; it needs a Blackwell card.
    ``gather=fp8`` gathers FSDP2's shards of these weights in float8, with one scale a weight.
    """

    name: ClassVar[str] = "fp8"
    workloads: ClassVar[tuple[str, ...]] = (TRAIN,)
    idle: ClassVar[str] = (
        "its layers are torchao's for training, which keep weights whole; take bf16_pure with "
        "float8:dynamic=on, which multiplies in float8 too"
    )
    unit: ClassVar[float] = 2**-4
    source: ClassVar[str] = (
        "Micikevicius et al. 2022, FP8 Formats for Deep Learning (arXiv:2209.05433); "
        "OCP Microscaling Formats (MX) v1.0; torchao.float8, and MXFP8Linear of its moe_training"
    )
    needs: ClassVar[tuple[str, ...]] = ("bf16", "torchao", "fp8")

    emulate: bool = False
    scaling: str = "tensorwise"
    format: str = "float8"
    gather: str = "whole"

    def __post_init__(self) -> None:
        allowed = {"scaling": SCALINGS, "format": ("float8", "mx"), "gather": ("whole", "fp8")}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                text = f"{name} is {getattr(self, name)!r}"
                raise ValueError(f"{text}; one of {', '.join(values)}")
        if self.format == "mx" and self.scaling != "tensorwise":
            raise ValueError(f"format=mx has scales of its own; leave scaling={self.scaling} out")
        if self.gather == "fp8" and (self.format, self.scaling) != ("float8", "tensorwise"):
            raise ValueError("gather=fp8 has one scale a weight; leave format and scaling out")

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        if self.emulate:
            return self.needs[:-1]
        return (*self.needs, "mxfp8") if self.format == "mx" else self.needs

    def refuses(self, launch: RunContext) -> str | None:
        if launch.traits & {"replaced_layers", "quantized_weights", "cut_weights"}:
            return "another part replaces the layers that multiply in float8; use bf16"
        if self.gather == "fp8" and not {"shards", "dtensor_weights"} <= launch.traits:
            return "only FSDP2 gathers weights in float8; take fsdp2, or leave gather out"
        return self._mx(launch) or super().refuses(launch)

    def _mx(self, launch: RunContext) -> str | None:
        """Return why blocks of the format MX cannot be cut; None if they can, or it is another."""
        if self.format != "mx":
            return None
        if launch.device == "cpu" and not self.emulate:
            return "a CPU has no product of MX operands; add emulate=on"
        for name in ("width", "tokens"):
            size = getattr(launch.subject.dimensions, name)
            if size % MX_BLOCK:
                return f"MX has blocks of {MX_BLOCK}, and the {name} is {size}; leave format out"
        return None

    def edit_model(self, module: Any, subject: Subject) -> None:
        from strategies.precision import float8

        # Layers of one vector per sample have few rows; float8 kernels need multiples of 16.
        float8.replace(module, subject.linears, self)

    def _products(self, trained: TrainingRun) -> None:
        """Skip the check of the base class: float8 products are identified in ``evidence``."""

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        from strategies.precision import float8

        types = super().evidence(trained)
        wanted = float8_layers(trained, float8.kind(self.format))
        ran = states.operations(trained, compiled=False)
        casts = sum(op.name == "aten::_to_copy" and "float8" in op.dtype for op in ran)
        demand(
            casts >= 2 * wanted,
            f"{casts} tensors were cast to float8, expected {2 * wanted} at least",
        )
        products = sum(op.name == "aten::_scaled_mm" for op in ran)
        demand(
            products == (0 if self.emulate else wanted),
            f"{products} matrix products ran in float8, expected {0 if self.emulate else wanted}",
        )
        scales = sum(map(self._finds_scales, ran))
        text = f"{scales} operands got scales of {self.format}, {self.scaling}"
        demand(scales >= 2 * wanted, f"{text}, expected {2 * wanted} at least")
        facts = {**types, "float8_casts": casts, "float8_products": products, "scaled": scales}
        if self.gather == "fp8":
            facts |= float8.gathered(trained)
        return facts | self._emulated(ran, wanted) if self.emulate else facts

    def _finds_scales(self, op: states.Operation) -> bool:
        """Return whether an operator finds the largest of what shares a scale."""
        if self.format == "mx":
            return op.name == "aten::amax" and op.shapes[0][-1] == MX_BLOCK
        return op.name == SCALINGS[self.scaling]

    def _emulated(self, ran: list[states.Operation], wanted: int) -> dict[str, Any]:
        kind = "bfloat16" if self.format == "mx" else "float32"
        rounded = sum(op.name == "aten::mm" and op.dtype == kind for op in ran)
        demand(
            rounded == wanted, f"{rounded} matrix products had rounded operands, expected {wanted}"
        )
        return {"emulated_products": rounded}
