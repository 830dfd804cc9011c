"""int8, float8 and nf4: weights stored in 8 and 4 bits by torchao and bitsandbytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence import states
from strategies.strategy import Strategy
from strategies.subject import Subject, weights_dtype
from strategies.workloads import SAMPLE


@dataclass(frozen=True, kw_only=True)
class Stored(Strategy):
    """Base of the ways to store the weights of the blocks' linear layers in fewer bits.

    ``codes``: torch's type that holds the bits. ``bits_each``: bits of a weight, without scales
    and palettes.
    """

    slot: ClassVar[Slot] = Slot.STORE
    alters: ClassVar[tuple[str, ...]] = ("forward",)
    workloads: ClassVar[tuple[str, ...]] = (SAMPLE,)
    codes: ClassVar[str] = "uint8"

    @property
    def bits_each(self) -> int:
        raise NotImplementedError

    def traits(self) -> frozenset[str]:
        return frozenset({"quantized_weights", "replaced_layers"})

    def store(self, module: Any, subject: Subject, names: list[str]) -> None:
        """Replace the named layers."""
        raise NotImplementedError

    def edit_model(self, module: Any, subject: Subject) -> None:
        from strategies.sampling.eight_bits import linears

        self.store(module, subject, linears(module, subject))

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        """Return the bits that the layers hold for a weight: of the codes' type, and of others."""
        from strategies.evidence.readings import bytes_of
        from strategies.sampling import eight_bits

        parts = (part for block in run.blocks() for part in block.modules())
        found = [part for part in parts if hasattr(part, "in_features")]
        elements = sum(layer.out_features * layer.in_features for layer in found)
        held = eight_bits.held(found)
        size, kind = bytes_of(held), f"torch.{self.codes}"
        of_codes = bytes_of(t for t in held if str(t.dtype) == kind)
        least = elements * self.bits_each // 8
        text = f"{of_codes} bytes of {self.codes} hold {elements} weights, expected {least}"
        demand(least <= of_codes <= 1.1 * least + 8 * len(found), f"{text} to a tenth more")
        # Scales and palettes, but no floats that stayed.
        text = f"{size - of_codes} bytes are beside the codes, as many as the floats had"
        floats = elements * weights_dtype(run.module).itemsize
        demand(size - of_codes < floats, text)
        bits = round(8 * size / elements, 3)
        return {"layers": len(found), "elements": elements, "bits_per_weight": bits}


@dataclass(frozen=True, kw_only=True)
class EightBits(Stored):
    """Base of the 8-bit formats: torchao's codes."""

    needs: ClassVar[tuple[str, ...]] = ("torchao",)
    bits_each: ClassVar[int] = 8

    def store(self, module: Any, subject: Subject, names: list[str]) -> None:
        from strategies.sampling.eight_bits import quantize

        quantize(module, names, self.name)


@dataclass(frozen=True, kw_only=True)
class Int8(EightBits):
    """The blocks' linear weights in 8 bits, a scale a row. Each product decodes them."""

    name: ClassVar[str] = "int8"
    source: ClassVar[str] = "Jacob et al. 2017 (arXiv:1712.05877); torchao.Int8WeightOnlyConfig"
    codes: ClassVar[str] = "int8"


@dataclass(frozen=True, kw_only=True)
class Nf4(Stored):
    """The blocks' linear weights in 4 bits (nf4).

    Two weights share a byte, and 64 share a scale. Each product decodes them.
    """

    name: ClassVar[str] = "nf4"
    source: ClassVar[str] = "Dettmers et al. 2023, QLoRA (arXiv:2305.14314); bitsandbytes"
    needs: ClassVar[tuple[str, ...]] = ("bitsandbytes",)
    bits_each: ClassVar[int] = 4

    def store(self, module: Any, subject: Subject, names: list[str]) -> None:
        from strategies.adapters.quantised_base import quantize

        quantize(module, names)


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

    dynamic: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        if self.emulate and not self.dynamic:
            raise ValueError("emulate is on; it is of products, so give dynamic=on too")

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        return (*self.needs, "fp8") if self.dynamic and not self.emulate else self.needs

    def refuses(self, launch: RunContext) -> str | None:
        width = launch.subject.survey.width
        if self.dynamic and width % MULTIPLE:
            text = f"products in float8 are of multiples of {MULTIPLE}"
            return f"{text}, and the width is {width}; leave dynamic out"
        return super().refuses(launch)

    def store(self, module: Any, subject: Subject, names: list[str]) -> None:
        from strategies.sampling.eight_bits import DYNAMIC, quantize

        quantize(module, names, DYNAMIC if self.dynamic else self.name)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        facts = super().evidence(run)
        if not self.dynamic:
            return facts
        layers, ran = facts["layers"], states.operations(run, compiled=False)
        products = sum(op.name == "aten::_scaled_mm" for op in ran)
        casts = sum(op.name == "aten::_to_copy" and op.dtype == self.codes for op in ran)
        demand(products == layers, f"{products} matrix products ran in float8, expected {layers}")
        demand(casts >= layers, f"{casts} operands were cast to float8, expected {layers}")
        return {**facts, "float8_products": products}
