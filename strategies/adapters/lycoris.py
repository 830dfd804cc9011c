"""Kronecker, Hadamard and orthogonal adapters of peft on frozen weights (lokr, loha, oft)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.adapters.beside import Beside, adapted, add_adapters
from strategies.base import demand
from strategies.engine import RunContext, TrainingRun
from strategies.subject import Subject

ADAPTER = "default"
"""Name that peft gives to an adapter if the caller names none."""


def _whole(value: Any, name: str) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; a whole number from 1")


class _Below:
    """Dropout of 0 in a prediction, where peft's random number has no value to compare."""

    def __lt__(self, drawn: Any) -> bool:
        return True


class _Products(Beside):
    """Base of adapters whose layers multiply parameters of their own in ``forward``."""

    rank: int

    def __post_init__(self) -> None:
        _whole(self.rank, "rank")
        super().__post_init__()

    def refuses(self, launch: RunContext) -> str | None:
        if "split_parameters" in launch.traits and "dtensor_weights" not in launch.traits:
            return (
                "peft multiplies these matrices outside of a module of their own, and reads the "
                "shape of a weight that the engine has released; take zero2, fsdp2, or lora"
            )
        return super().refuses(launch)

    def inject(self, module: Any, subject: Subject, names: Sequence[str], dtype: Any) -> None:
        from strategies import initial

        add_adapters(module, subject, self.config(), names, dtype)
        if initial.storageless():
            for layer in adapted(module):
                layer.module_dropout[ADAPTER] = _Below()

    def config(self) -> Any:
        """Return peft's configuration, without its target modules."""
        raise NotImplementedError

    def sized(self, layer: Any, shape: Any) -> int:
        """Check the sizes of one layer's matrices; ``shape`` returns that of a whole parameter.

        Returns the inner dimension of its products, 0 if it has none.
        """
        raise NotImplementedError

    def shapes(self, trained: TrainingRun, layers: Sequence[Any]) -> dict[str, Any]:
        def shape(matrices: Any) -> tuple[int, ...]:
            return tuple(trained.engine.part(matrices[ADAPTER]).shape)

        ranks = [self.sized(layer, shape) for layer in layers]
        strange = sorted({rank for rank in ranks if rank not in (0, self.rank)})
        demand(not strange, f"the adapters' ranks are {strange}, not {self.rank}")
        whole = {"whole_matrices": ranks.count(0)} if 0 in ranks else {}
        return {"rank": self.rank, **whole}


def _covers(layer: Any, height: int, width: int) -> None:
    base = layer.base_layer
    demand(
        (height, width) == (base.out_features, base.in_features),
        f"an adapter changes a matrix of {height} by {width}, and its layer's has "
        f"{base.out_features} by {base.in_features}",
    )


@dataclass(frozen=True, kw_only=True)
class Lokr(_Products):
    """Trains Kronecker products beside frozen linear layers.

    The change of a weight is the Kronecker product of a small matrix and a large one. The large one
    is a product of two matrices of ``rank``; it is whole if ``rank`` is at least half of its longer
    side. ``factor`` divides each side of the weight; the small matrix has that size. ``factor=-1``
    divides each side near its root.

    In each forward pass peft computes the whole change of a weight. It is kept for backward, and is
    as large as the weight. ``targets``, ``blocks``, ``dtype`` and ``reach`` are ``lora``'s.
    """

    name: ClassVar[str] = "lokr"
    source: ClassVar[str] = "Yeh et al. 2023, LyCORIS (arXiv:2309.14859); peft"
    silent: ClassVar[str] = "lokr_w1"

    rank: int = 8
    factor: int = -1
    targets: str = "all"
    dtype: str = "model"
    blocks: str = "all"
    reach: str = "blocks"

    def __post_init__(self) -> None:
        if self.factor != -1:
            _whole(self.factor, "factor")
        super().__post_init__()

    def config(self) -> Any:
        import peft

        return peft.LoKrConfig(r=self.rank, alpha=self.rank, decompose_factor=self.factor)

    def sized(self, layer: Any, shape: Any) -> int:
        from peft.tuners.lokr.layer import factorization

        small, pair = shape(layer.lokr_w1), ADAPTER in layer.lokr_w2_a
        sides = layer.base_layer.out_features, layer.base_layer.in_features
        wanted = tuple(factorization(side, self.factor)[0] for side in sides)
        demand(small == wanted, f"a small matrix has the shape {small}, expected {wanted}")
        if pair:
            (height, rank), (_, width) = shape(layer.lokr_w2_a), shape(layer.lokr_w2_b)
        else:
            (height, width), rank = shape(layer.lokr_w2), 0
            demand(2 * self.rank >= max(height, width), "a large matrix is whole, not a product")
        _covers(layer, small[0] * height, small[1] * width)
        return rank


@dataclass(frozen=True, kw_only=True)
class Loha(_Products):
    """Trains Hadamard products beside frozen linear layers.

    The change of a weight is the elementwise product of two products of matrices of ``rank``. Its
    rank is up to the square of ``rank``.

    In each forward pass peft computes the whole change of a weight. It is kept for backward, and is
    as large as the weight. ``targets``, ``blocks``, ``dtype`` and ``reach`` are ``lora``'s.
    """

    name: ClassVar[str] = "loha"
    source: ClassVar[str] = "Hyeon-Woo et al. 2021, FedPara (arXiv:2108.06098); peft"
    silent: ClassVar[str] = "hada_w2_b"

    rank: int = 8
    targets: str = "all"
    dtype: str = "model"
    blocks: str = "all"
    reach: str = "blocks"

    def config(self) -> Any:
        import peft

        return peft.LoHaConfig(r=self.rank, alpha=self.rank)

    def sized(self, layer: Any, shape: Any) -> int:
        first = shape(layer.hada_w1_a), shape(layer.hada_w1_b)
        second = shape(layer.hada_w2_a), shape(layer.hada_w2_b)
        demand(first == second, f"two factors have the shapes {first} and {second}")
        (height, rank), (_, width) = first
        _covers(layer, height, width)
        return rank


@dataclass(frozen=True, kw_only=True)
class Oft(Beside):
    """Trains rotations of the inputs of frozen linear layers.

    The features of an input are cut into groups of ``size``, and each group is multiplied by an
    orthogonal matrix. If ``size`` does not divide a layer's features, peft takes the nearest number
    that does. ``targets``, ``blocks``, ``dtype`` and ``reach`` are ``lora``'s.
    """

    name: ClassVar[str] = "oft"
    source: ClassVar[str] = (
        "Qiu et al. 2023, OFT (arXiv:2306.07280); Qiu et al. 2025, OFTv2 (arXiv:2506.19847); peft"
    )
    silent: ClassVar[str] = "oft_R"

    size: int = 32
    targets: str = "all"
    dtype: str = "model"
    blocks: str = "all"
    reach: str = "blocks"

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 2:
            raise ValueError(f"size is {self.size!r}; a whole number from 2")
        super().__post_init__()

    def inject(self, module: Any, subject: Subject, names: Sequence[str], dtype: Any) -> None:
        import peft

        add_adapters(module, subject, peft.OFTConfig(oft_block_size=self.size), names, dtype)

    def shapes(self, trained: TrainingRun, layers: Sequence[Any]) -> dict[str, Any]:
        sizes = set()
        for layer in layers:
            groups, angles = trained.engine.part(layer.oft_R[ADAPTER].weight).shape
            size = (1 + math.isqrt(1 + 8 * angles)) // 2  # angles = size * (size - 1) / 2
            width = layer.base_layer.in_features
            demand(groups * size == width, f"{groups} groups of {size} are not {width} features")
            demand(
                size == self.size or width % self.size > 0 or width < self.size,
                f"rotations are of {size} features, expected {self.size}",
            )
            sizes.add(size)
        return {"sizes": sorted(sizes)}
