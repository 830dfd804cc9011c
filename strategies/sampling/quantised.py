"""int8, float8 and nf4: weights stored in 8 and 4 bits by torchao and bitsandbytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence import states
from strategies.sampling.store import Stored
from strategies.subject import Subject

NF4_BLOCK = 64
"""Number of weights that share a scale, bitsandbytes' default."""


@dataclass(frozen=True, kw_only=True)
class EightBits(Stored):
    """Base of the 8-bit formats: torchao's codes, and ``each_row`` bytes of scales and zero points
    per row."""

    needs: ClassVar[tuple[str, ...]] = ("torchao",)
    bits_each: ClassVar[int] = 8
    each_row: ClassVar[int]

    def store(self, module: Any, subject: Subject, names: list[str]) -> None:
        from strategies.sampling.eight_bits import quantize

        quantize(module, names, self.name)

    def most_bytes(self, shapes: list[tuple[int, int]], itemsize: int) -> int:
        return sum(out * (width + self.each_row) for out, width in shapes)


@dataclass(frozen=True, kw_only=True)
class Int8(EightBits):
    """The blocks' linear weights in 8 bits, a scale a row. Each product decodes them."""

    name: ClassVar[str] = "int8"
    source: ClassVar[str] = "Jacob et al. 2017 (arXiv:1712.05877); torchao.Int8WeightOnlyConfig"
    codes: ClassVar[str] = "int8"
    # A scale, and a zero point that is stored although it is zero.
    each_row: ClassVar[int] = 4 + 1


@dataclass(frozen=True, kw_only=True)
class Nf4(Stored):
    """The blocks' linear weights in 4 bits (nf4).

    Two weights share a byte, and 64 share a scale. Each product decodes them.
    """

    name: ClassVar[str] = "nf4"
    source: ClassVar[str] = "Dettmers et al. 2023, QLoRA (arXiv:2305.14314); bitsandbytes"
    needs: ClassVar[tuple[str, ...]] = ("bitsandbytes",)

    bits_each: ClassVar[int] = 4
    codes: ClassVar[str] = "uint8"

    def store(self, module: Any, subject: Subject, names: list[str]) -> None:
        from strategies.adapters.quantised_base import quantize

        quantize(module, names)

    def most_bytes(self, shapes: list[tuple[int, int]], itemsize: int) -> int:
        def of(elements: int) -> int:
            blocks = -(-elements // NF4_BLOCK)
            # An 8-bit scale per block, a 32-bit one per 256 of those, and tables of 16 and 256.
            return -(-elements // 2) + blocks + 4 * -(-blocks // 256) + 4 * (16 + 256)

        return sum(of(out * width) for out, width in shapes)


# ---- float8 ----


MULTIPLE = 16
"""Required divisor of the weights' sides in torch's float8 product."""


@dataclass(frozen=True, kw_only=True)
class Float8(EightBits):
    """The blocks' linear weights in float8, a scale a row.

    float8 has four bits of exponent and three of mantissa. Each product decodes the weights.
    ``dynamic=on`` rounds the input of a layer to float8 as well, with a scale a row, and multiplies
    in float8. ``emulate=on`` does that on a CPU: the same numbers, without the speed.
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

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        return (*self.needs, "fp8") if self.dynamic and not self.emulate else self.needs

    def refuses(self, launch: RunContext) -> str | None:
        width = launch.subject.dimensions.width
        if self.dynamic and width % MULTIPLE:
            text = f"products in float8 are of multiples of {MULTIPLE}"
            return f"{text}, and the width is {width}; leave dynamic out"
        return super().refuses(launch)

    def store(self, module: Any, subject: Subject, names: list[str]) -> None:
        from strategies.sampling.eight_bits import DYNAMIC, quantize

        quantize(module, names, DYNAMIC if self.dynamic else self.name)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        facts = super().evidence(trained)
        return {**facts, **self._multiplied(trained, facts["layers"])} if self.dynamic else facts

    def _multiplied(self, trained: TrainingRun, layers: int) -> dict[str, Any]:
        """Check the float8 products of one forward, and the operands that were cast to float8."""
        ran = states.operations(trained, compiled=False)
        products = sum(op.name == "aten::_scaled_mm" for op in ran)
        casts = sum(op.name == "aten::_to_copy" and op.dtype == self.codes for op in ran)
        demand(products == layers, f"{products} matrix products ran in float8, expected {layers}")
        demand(casts >= layers, f"{casts} operands were cast to float8, expected {layers}")
        return {"float8_products": products, "float8_casts": casts}
