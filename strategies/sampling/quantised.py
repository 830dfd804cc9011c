"""Weights in 8 and 4 bits, by libraries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.engine import Launch
from strategies.sampling.store import Stored
from strategies.subject import Subject

__all__ = ["EightBits", "Int8", "Nf4"]

NF4_BLOCK = 64
"""Weights that share a scale, by bitsandbytes' default."""


@dataclass(frozen=True, kw_only=True)
class EightBits(Stored):
    """What two kinds of 8 bits share: torchao's codes, and ``each_row`` bytes of numbers a row."""

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
    """Weights of the blocks' linear layers in 8 bits with a scale a row, turned back for each
    product.
    """

    name: ClassVar[str] = "int8"
    source: ClassVar[str] = "Jacob et al. 2017 (arXiv:1712.05877); torchao.Int8WeightOnlyConfig"
    codes: ClassVar[str] = "int8"
    # A scale, and a place of zero that is kept though it is zero.
    each_row: ClassVar[int] = 4 + 1

    def levels(self, shape: tuple[int, int]) -> tuple[int, int]:
        return 2**8, shape[1]


@dataclass(frozen=True, kw_only=True)
class Nf4(Stored):
    """Weights of the blocks' linear layers in 4 bits (nf4), two to a byte, with a scale for each 64
    of them, turned back for each product.
    """

    name: ClassVar[str] = "nf4"
    source: ClassVar[str] = "Dettmers et al. 2023, QLoRA (arXiv:2305.14314); bitsandbytes"
    needs: ClassVar[tuple[str, ...]] = ("bitsandbytes",)

    bits_each: ClassVar[int] = 4
    codes: ClassVar[str] = "uint8"

    def store(self, module: Any, subject: Subject, names: list[str]) -> None:
        from strategies.adapters.nf4 import quantize

        quantize(module, names)

    def most_bytes(self, shapes: list[tuple[int, int]], itemsize: int) -> int:
        def of(elements: int) -> int:
            blocks = -(-elements // NF4_BLOCK)
            # A scale of 8 bits a block, one of 32 for each 256 of those, and tables of 16 and 256.
            return -(-elements // 2) + blocks + 4 * -(-blocks // 256) + 4 * (16 + 256)

        return sum(of(out * width) for out, width in shapes)

    def levels(self, shape: tuple[int, int]) -> tuple[int, int]:
        return 2**4, NF4_BLOCK

    def refuses(self, launch: Launch) -> str | None:
        if "compiled" in launch.traits:
            return "bitsandbytes' layer breaks the graph at each product; leave compile out"
        return super().refuses(launch)
