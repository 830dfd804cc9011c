"""cast: frozen weights stored in 8 bits, decoded for each product."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence.readings import wrapped
from strategies.strategy import Strategy
from strategies.subject import Subject

BITS = {"int8": "int8", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True, kw_only=True)
class Cast(Strategy):
    """Stores frozen linear weights of the blocks in 8 bits.

    Each weight has a code, and each row a scale (``to``: ``int8`` or ``fp8``). Forward and backward
    decode them for each product, to the type of the computation. With ``lora`` it is an 8-bit base
    under adapters.
    """

    name: ClassVar[str] = "cast"
    slot: ClassVar[Slot] = Slot.CAST
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("forward",)
    source: ClassVar[str] = (
        "Dettmers et al. 2022, LLM.int8() (arXiv:2208.07339), section 2 (absmax, a scale a row); "
        "diffusers, enable_layerwise_casting"
    )

    to: str = "int8"

    def __post_init__(self) -> None:
        if self.to not in BITS:
            raise ValueError(f"to is {self.to!r}; one of {', '.join(BITS)}")

    def traits(self) -> frozenset[str]:
        return frozenset({"quantized_weights"})

    def refuses(self, launch: RunContext) -> str | None:
        traits = launch.traits
        if "frozen_weights" not in traits:
            return "weights that train lose their updates in 8 bits; add lora, or leave it out"
        if "shards" in traits and "dtensor_weights" not in traits:
            return "the engine would shard codes, and round their scales; take ddp or fsdp2"
        if "packed_weights" in traits:
            return "these weights are packed in 4 bits already; take lora in the place of qlora"
        if "weight_norms" in traits:
            return "another part computes with the weights themselves; take lora"
        if "doubles_tokens" in traits:
            return "another part trains copies of these layers; take lora"
        return None

    def edit_model(self, module: Any, subject: Subject) -> None:
        from strategies.adapters.quantised_base import code

        code(module, subject.linears, self.to)

    def observe(self, trained: TrainingRun) -> AbstractContextManager[Any]:
        if "compiled" in trained.launch.traits:
            return nullcontext()  # a watched graph would run uncompiled
        return _decodings(self.to)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        from strategies.adapters.quantised_base import coded_facts

        wanted = len(trained.subject.linears)
        facts = coded_facts(trained.module, wanted, self.to)
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
