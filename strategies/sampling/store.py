"""Base class of strategies that store weights in fewer bits and decode them for each product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Slot, demand
from strategies.engine import TrainingRun
from strategies.strategy import Strategy
from strategies.subject import Subject
from strategies.workloads import SAMPLE


@dataclass(frozen=True, kw_only=True)
class Stored(Strategy):
    """Base of the ways to store the weights of the blocks' linear layers."""

    slot: ClassVar[Slot] = Slot.STORE
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("forward",)
    workloads: ClassVar[tuple[str, ...]] = (SAMPLE,)

    def traits(self) -> frozenset[str]:
        return frozenset({"quantized_weights", "replaced_layers"})

    def store(self, module: Any, subject: Subject, names: list[str]) -> None:
        """Replace the named layers."""
        raise NotImplementedError

    codes: ClassVar[str]
    """torch's type that holds the bits."""

    @property
    def bits_each(self) -> int:
        """Bits of a weight, without scales and palettes."""
        raise NotImplementedError

    def most_bytes(self, shapes: list[tuple[int, int]], itemsize: int) -> int:
        """Return the largest allowed bytes of weights of these shapes [out, in], with scales.

        ``itemsize``: bytes of one of their floats.
        """
        raise NotImplementedError

    def edit_model(self, module: Any, subject: Subject) -> None:
        from strategies.sampling.eight_bits import linears

        self.store(module, subject, linears(module, subject))

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        """Check the bytes that the layers hold, in all and of the codes' type."""
        from strategies.sampling import eight_bits

        names = eight_bits.wanted(trained)
        found = [trained.module.get_submodule(name) for name in names]
        shapes = [(layer.out_features, layer.in_features) for layer in found]
        dtype, held = trained.subject.dtype(trained.module), eight_bits.held_bytes(found)
        most = self.most_bytes(shapes, dtype.itemsize)
        elements = sum(out * width for out, width in shapes)
        least = elements * self.bits_each // 8
        text = f"{held} bytes hold the weights of {len(found)} layers, expected {least} to {most}"
        demand(least <= held <= most, text)
        of_codes = eight_bits.held_bytes(found, self.codes)
        demand(
            of_codes >= least,
            f"{of_codes} bytes of {self.codes} hold the codes, expected at least {least}",
        )
        return {
            "layers": len(found),
            "elements": elements,
            "bytes": held,
            "bits_per_weight": round(8 * held / elements, 3),
        }
