"""cast: frozen weights stored in 8 bits, decoded for each product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.strategy import Strategy
from strategies.subject import Subject

INT8_PRODUCT = "aten::_int_mm"
MULTIPLE = 8
"""Required divisor of the weights' sides in torch's int8 product."""


@dataclass(frozen=True, kw_only=True)
class Cast(Strategy):
    """Stores frozen linear weights in 8 bits.

    Each weight has a code, and each row a scale (``to``: ``int8`` or ``fp8``). Forward and backward
    decode them for each product, to the type of the computation. With ``lora`` it is an 8-bit base
    under adapters.

    ``layers=blocks`` codes the layers of the blocks that can have an adapter. ``layers=all`` codes
    every linear layer, except those that the model's class keeps in float32.

    ``dynamic=on`` multiplies in int8 (W8A8). It rounds the input of a layer to int8 as well, and in
    backward the gradient of its output, with a scale a row.
    """

    name: ClassVar[str] = "cast"
    slot: ClassVar[Slot] = Slot.CAST
    alters: ClassVar[tuple[str, ...]] = ("forward",)
    source: ClassVar[str] = (
        "Dettmers et al. 2022, LLM.int8() (arXiv:2208.07339), section 2 (absmax, a scale a row); "
        "diffusers, enable_layerwise_casting; OneTrainer, LinearW8A8"
    )
    values: ClassVar[dict[str, Any]] = {"to": ("int8", "fp8"), "layers": ("blocks", "all")}

    to: str = "int8"
    dynamic: bool = False
    layers: str = "blocks"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dynamic and self.to != "int8":
            raise ValueError(f"dynamic=on multiplies in int8; leave to={self.to} out")

    def traits(self) -> frozenset[str]:
        return frozenset({"quantized_weights"})

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        return ("int8",) if self.dynamic else ()

    def refuses(self, launch: RunContext) -> str | None:
        if fault := super().refuses(launch):
            return fault
        # A survey builds a public model, which takes seconds.
        if self.dynamic and (width := launch.subject.survey.width) % MULTIPLE:
            text = f"products in int8 are of multiples of {MULTIPLE}"
            return f"{text}, and the width is {width}; leave dynamic out"
        return None

    def edit_model(self, module: Any, subject: Subject) -> None:
        from strategies.adapters.coded import code, unpacked

        names = subject.linears if self.layers == "blocks" else unpacked(module)
        code(module, names, self.to, self.dynamic)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        from strategies.adapters.coded import Coded, coded_facts, unpacked

        wanted, seen = len(run.subject.linears), run.observed
        full = unpacked(run.module) if self.layers == "all" else ()
        demand(not full, f"{len(full)} linear layers are stored in full: {', '.join(full[:3])}")
        facts = coded_facts(run.module, wanted, self.to)
        layers = [m for m in run.module.modules() if isinstance(m, Coded)]
        rounding = sum(layer.dynamic for layer in layers)
        text = f"{rounding} of {len(layers)} layers multiply in int8"
        demand(rounding == self.dynamic * len(layers), text)
        if not seen.ran:  # a training run, or compiled blocks
            return facts
        if self.dynamic:
            ran = sum(op.name == INT8_PRODUCT for op in seen.ran) / seen.micro_steps
            demand(ran > 0, "no matrix product ran in int8: no layer multiplies enough rows")
            return {**facts, "int8_products": ran}
        shapes = {(m.out_features, m.in_features) for m in layers}
        casts = [tuple(r.shapes[0]) for r in seen.ran if r.name == "aten::_to_copy"]
        each = sum(shape in shapes for shape in casts) / seen.micro_steps
        text = f"{each:g} matrix products decoded {self.to}, expected at least {wanted}"
        demand(each >= wanted, text)
        return {**facts, "decodings": each}
