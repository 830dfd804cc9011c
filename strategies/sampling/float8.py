"""Weights in float8, and products of two operands in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import demand
from strategies.engine import Launch, Trained
from strategies.evidence import forward
from strategies.sampling.quantised import EightBits
from strategies.subject import Subject

__all__ = ["Float8"]

VALUES = 2**8 - 3
"""Of its codes two are no numbers, and two are zero."""
MULTIPLE = 16
"""Of which the sides of weights must be multiples, for torch's product of them."""


@dataclass(frozen=True, kw_only=True)
class Float8(EightBits):
    """Weights of the blocks' linear layers in float8 (four bits of exponent, three of mantissa)
    with a scale a row, turned back for each product. ``dynamic=on`` rounds what a layer is given to
    float8 as well, each row by a scale of its own, and multiplies the two in float8; with
    ``emulate=on`` by a CPU's kernel, which has its numbers without its speed.
    """

    name: ClassVar[str] = "float8"
    source: ClassVar[str] = (
        "Micikevicius et al. 2022 (arXiv:2209.05433); torchao.Float8WeightOnlyConfig, and "
        "Float8DynamicActivationFloat8WeightConfig"
    )
    codes: ClassVar[str] = "float8_e4m3fn"
    each_row: ClassVar[int] = 4

    dynamic: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        if self.emulate and not self.dynamic:
            raise ValueError("emulate is on; it is of products, so give dynamic=on too")

    def requires(self, launch: Launch) -> tuple[str, ...]:
        return (*self.needs, "fp8") if self.dynamic and not self.emulate else self.needs

    def refuses(self, launch: Launch) -> str | None:
        if self.dynamic and (reason := self._product(launch)):
            return reason
        return super().refuses(launch)

    def _product(self, launch: Launch) -> str | None:
        """Why torch's product of float8 cannot be had."""
        if self.emulate and launch.device == "cuda":
            return "a CPU's kernel emulates, and a GPU multiplies in float8; leave emulate out"
        if launch.device == "cuda" and "pure_bf16" not in launch.traits:
            return "a GPU's product of rows in float8 gives bfloat16; add bf16_pure"
        width = launch.subject.dimensions.width
        if width % MULTIPLE:
            told = f"products in float8 are of multiples of {MULTIPLE}"
            return f"{told}, and the width is {width}; leave dynamic out"
        return None

    def store(self, module: Any, subject: Subject, names: list[str]) -> None:
        from strategies.sampling.eight_bits import DYNAMIC, quantize

        quantize(module, names, DYNAMIC if self.dynamic else self.name)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        facts = super().evidence(trained)
        return {**facts, **self._multiplied(trained, facts["layers"])} if self.dynamic else facts

    def _multiplied(self, trained: Trained, layers: int) -> dict[str, Any]:
        """Products in float8 of one forward, and the operands that became float8 for them."""
        ran = forward.operations(trained, compiled=False)
        products = sum(op.name == "aten::_scaled_mm" for op in ran)
        casts = sum(op.name == "aten::_to_copy" and op.dtype == self.codes for op in ran)
        demand(products == layers, f"{products} products ran in float8, of {layers}")
        demand(casts >= layers, f"{casts} operands became float8, of {layers}")
        return {"float8_products": products, "float8_casts": casts}

    def levels(self, shape: tuple[int, int]) -> tuple[int, int]:
        return VALUES, shape[1]
