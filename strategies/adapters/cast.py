"""cast: frozen weights stored in 8 bits, decoded for each product."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence.readings import wrapped
from strategies.evidence.rules import label
from strategies.strategy import Strategy
from strategies.subject import Subject

BITS = {"int8": "int8", "fp8": "float8_e4m3fn"}
INT8_PRODUCT = "aten::_int_mm"
LAYERS = ("blocks", "all")
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
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("forward",)
    source: ClassVar[str] = (
        "Dettmers et al. 2022, LLM.int8() (arXiv:2208.07339), section 2 (absmax, a scale a row); "
        "diffusers, enable_layerwise_casting; OneTrainer, LinearW8A8"
    )

    to: str = "int8"
    dynamic: bool = False
    layers: str = "blocks"

    def __post_init__(self) -> None:
        if self.layers not in LAYERS:
            raise ValueError(f"layers is {self.layers!r}; one of {', '.join(LAYERS)}")
        if self.to not in BITS:
            raise ValueError(f"to is {self.to!r}; one of {', '.join(BITS)}")
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
        if self.dynamic and (width := launch.subject.dimensions.width) % MULTIPLE:
            text = f"products in int8 are of multiples of {MULTIPLE}"
            return f"{text}, and the width is {width}; leave dynamic out"
        return None

    def edit_model(self, module: Any, subject: Subject) -> None:
        from strategies.adapters.quantised_base import code

        names = subject.linears if self.layers == "blocks" else self._whole(module)
        code(module, names, self.to, self.dynamic)

    def _whole(self, module: Any) -> tuple[str, ...]:
        """Return the names of layers that ``module`` stores in full, and ``layers`` codes."""
        from strategies.adapters.quantised_base import unpacked

        return unpacked(module) if self.layers == "all" else ()

    def observe(self, trained: TrainingRun) -> AbstractContextManager[Any]:
        if "compiled" in trained.launch.traits:
            return nullcontext()  # a watched graph would run uncompiled
        return _rows(trained.module) if self.dynamic else _decodings(self.to)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        from strategies.adapters.quantised_base import coded_facts

        wanted, whole = len(trained.subject.linears), self._whole(trained.module)
        demand(not whole, f"{len(whole)} linear layers are stored in full: {', '.join(whole[:3])}")
        facts = coded_facts(trained.module, wanted, self.to, more=self.layers != "blocks")
        if self.dynamic:
            return facts | _multiplied(trained, self.note(trained))
        seen = self.note(trained)
        if seen is None:
            return facts
        each = seen["codes"] / trained.observed.micro_steps
        demand(
            each >= wanted,
            f"{each:g} matrix products decoded {self.to}, expected at least {wanted}",
        )
        return {**facts, "decodings": each}


@contextmanager
def _decodings(to: str) -> Iterator[dict[str, int]]:
    """Count how often codes of this type were decoded in a watched step."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = {"codes": 0}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if wrapped(types):
                return NotImplemented
            out = f(*args, **(kwargs or {}))
            stored = getattr(args[0], "dtype", None) if args else None
            if f is torch.ops.aten._to_copy.default and stored is getattr(torch, BITS[to]):
                seen["codes"] += 1
            return out

    with Watch():
        yield seen


# ---- products in int8 ----


@contextmanager
def _rows(module: Any) -> Iterator[dict[str, set[str]]]:
    """Record the names of the coded layers that multiply enough rows, and of those whose input
    takes a gradient."""
    import torch

    from strategies.adapters.coded import LEAST_ROWS
    from strategies.adapters.quantised_base import Coded

    seen: dict[str, set[str]] = {"forward": set(), "backward": set()}
    handles = []
    for name, layer in module.named_modules():

        def note(_: Any, given: Any, name: str = name) -> None:
            if given[0].shape[:-1].numel() < LEAST_ROWS:
                return
            seen["forward"].add(name)
            if given[0].requires_grad and torch.is_grad_enabled():
                seen["backward"].add(name)

        if isinstance(layer, Coded):
            handles.append(layer.register_forward_pre_hook(note))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _multiplied(trained: TrainingRun, seen: dict[str, set[str]] | None) -> dict[str, Any]:
    """Check the int8 products of a watched step, or of one forward if no step was watched."""
    from strategies.evidence import states

    if seen is None:
        with _rows(trained.module) as now:
            ran = states.operations(trained, compiled=False)
        found = {"forward": float(sum(op.name == INT8_PRODUCT for op in ran))}
        wanted = {"forward": len(now["forward"])}
        if not now["forward"]:  # one sample may have too few rows
            return label({"dynamic": True}, "dynamic")
    else:
        steps, done = trained.observed.micro_steps, trained.observed.ran
        found = {
            phase: sum(op.name == INT8_PRODUCT and op.phase == phase for op in done) / steps
            for phase in seen
        }
        wanted = {phase: len(names) for phase, names in seen.items()}
    demand(wanted["forward"] > 0, "no layer multiplies enough rows for an int8 product")
    for phase, most in wanted.items():
        text = f"{found[phase]:g} matrix products of {phase} ran in int8"
        demand(found[phase] >= most, f"{text}, expected at least {most}")
    return {"int8_products": found}
