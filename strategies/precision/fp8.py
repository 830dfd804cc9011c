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


def float8_layers(trained: TrainingRun) -> int:
    """Return the number of float8 layers; it may exceed the number requested if a copy has its
    own."""
    from torchao.float8.float8_linear import Float8Linear

    layers = sum(isinstance(m, Float8Linear) for m in trained.module.modules())
    wanted = len(trained.subject.linears)
    demand(layers >= wanted, f"{layers} of {wanted} layers multiply in float8")
    return layers


@dataclass(frozen=True, kw_only=True)
class Fp8(Bf16):
    """The blocks' matrix products in float8, others as bf16.

    Each tensor has a scale. Weights stay in high precision and are cast at each use. ``emulate=on``
    rounds the operands to float8 and multiplies in float32: float8's numbers on any device, without
    its speed.
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
        "torchao.float8.convert_to_float8_training"
    )
    needs: ClassVar[tuple[str, ...]] = ("bf16", "torchao", "fp8")

    emulate: bool = False

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        return self.needs[:-1] if self.emulate else self.needs

    def refuses(self, launch: RunContext) -> str | None:
        if launch.traits & {"replaced_layers", "quantized_weights", "cut_weights"}:
            return "another part replaces the layers that multiply in float8; use bf16"
        return super().refuses(launch)

    def edit_model(self, module: Any, subject: Subject) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # Layers of one vector per sample have few rows; float8 kernels need multiples of 16.
        chosen = {module.get_submodule(name) for name in subject.linears}
        convert_to_float8_training(
            module,
            module_filter_fn=lambda layer, name: layer in chosen,
            config=Float8LinearConfig(emulate=self.emulate),
        )

    def _products(self, trained: TrainingRun) -> None:
        """Skip the check of the base class: float8 products are identified in ``evidence``."""

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        types = super().evidence(trained)
        wanted = float8_layers(trained)
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
        facts = {**types, "float8_casts": casts, "float8_products": products}
        if not self.emulate:
            return facts
        rounded = sum(op.name == "aten::mm" and op.dtype == "float32" for op in ran)
        demand(
            rounded == wanted, f"{rounded} matrix products had rounded operands, expected {wanted}"
        )
        return {**facts, "emulated_products": rounded}
