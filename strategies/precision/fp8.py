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
"""Parts of a matrix that share a scale -> operator that finds the largest number of each."""


@dataclass(frozen=True, kw_only=True)
class Fp8(Bf16):
    """The blocks' matrix products in float8, others as bf16.

    Each tensor has a scale. Weights stay in high precision and are cast at each use. ``emulate=on``
    rounds the operands to float8 and multiplies in higher precision: float8's numbers on any
    device, without its speed.

    ``scaling=rowwise`` has a scale for each row of the first operand and each column of the second.
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
        "Micikevicius et al. 2022, FP8 Formats for Deep Learning (arXiv:2209.05433); torchao.float8"
    )
    needs: ClassVar[tuple[str, ...]] = ("bf16", "torchao", "fp8")
    own_layers: ClassVar[bool] = True
    values: ClassVar[dict[str, Any]] = {
        "scaling": tuple(SCALINGS),
        "gather": ("whole", "fp8"),
    }

    emulate: bool = False
    scaling: str = "tensorwise"
    gather: str = "whole"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gather == "fp8" and self.scaling != "tensorwise":
            raise ValueError("gather=fp8 has one scale a weight; leave scaling out")

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        return self.needs[:-1] if self.emulate else self.needs

    def edit_model(self, module: Any, subject: Subject) -> None:
        from strategies.precision import float8

        # Layers of one vector per sample have few rows; float8 kernels need multiples of 16.
        float8.replace(module, subject.linears, self)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        from torchao.float8.float8_linear import Float8Linear

        from strategies.precision import float8

        types, config = super().evidence(run), float8.config(self)
        # A copy of a block (ControlNet's) has layers of its own.
        layers = [m for m in run.module.modules() if isinstance(m, Float8Linear)]
        alike, least = sum(m.config == config for m in layers), len(run.subject.linears)
        text = f"{alike} of {least} layers multiply in float8, {self.scaling}"
        demand(alike == len(layers) >= least, text)
        ran = states.operations(run, compiled=False)
        casts = sum(op.name == "aten::_to_copy" and "float8" in op.dtype for op in ran)
        text = f"{casts} tensors were cast to float8, expected {2 * alike} at least"
        demand(casts >= 2 * alike, text)
        # Where they are emulated, operands rounded to float8 are multiplied as float32.
        products = sum(op.name == "aten::_scaled_mm" for op in ran)
        wanted = 0 if self.emulate else alike
        demand(products == wanted, f"{products} products ran in float8, expected {wanted}")
        scales = sum(op.name == SCALINGS[self.scaling] for op in ran)
        text = f"{scales} operands got scales, {self.scaling}, expected {2 * alike} at least"
        demand(scales >= 2 * alike, text)
        facts = {**types, "float8_casts": casts, "float8_products": products}
        return facts | (float8.gathered(run) if self.gather == "fp8" else {})
