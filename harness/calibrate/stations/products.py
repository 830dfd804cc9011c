"""FLOP/s of matrix products of random data, by type: large squares, and the shapes of a DiT."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from harness.calibrate.stations.asked import Asked, reason, seconds_of

__all__ = ["measure"]

TYPES = {
    "cuda": ("bfloat16", "float16", "tf32", "float32", "float8"),
    "cpu": ("float32", "bfloat16", "float16"),
}
SIDES = {"cuda": (4096, 8192), "cpu": (512, 1024, 2048)}
SMALL_SIDES = (128,)
BLOCK = {"cuda": (8192, 1152), "cpu": (2048, 384)}
"""Tokens of a micro batch, and width: of DiT-XL/2 with 32 samples, and of DiT-S with 8."""
SMALL_BLOCK = (128, 64)
FP8 = torch.float8_e4m3fn


def measure(asked: Asked) -> dict[str, Any]:
    """``products`` and ``model_products``, FLOP/s by type; ``missing``: type -> why not."""
    kind = asked.device.type
    sides = SMALL_SIDES if asked.small else SIDES[kind]
    block = SMALL_BLOCK if asked.small else BLOCK[kind]
    squares, blocks, missing = {}, {}, {}
    for name in TYPES[kind]:
        try:
            with _rounding(name):
                squares[name] = max(_square(name, side, asked) for side in sides)
                if name != "float8":  # its products in a model are of rows scaled one by one
                    blocks[name] = _block(name, *block, asked)
        except Exception as error:  # whatever a library lacks for a type is the answer
            missing[name] = reason(error)
    return {"products": squares, "model_products": blocks, "missing": missing}


@contextlib.contextmanager
def _rounding(name: str) -> Iterator[None]:
    """float32's products as they are, or rounded to TF32."""
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def _type(name: str) -> torch.dtype:
    return torch.float32 if name == "tf32" else getattr(torch, name)


def _square(name: str, side: int, asked: Asked) -> float:
    if name == "float8":
        return 2 * side**3 / seconds_of(_fp8_product(side, asked), asked)
    a, b = (asked.random(side, side, dtype=_type(name)) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / seconds_of(lambda: torch.mm(a, b, out=out), asked)


def _fp8_product(side: int, asked: Asked) -> Callable[[], Any]:
    a, b = (asked.random(side, side).to(FP8) for _ in range(2))
    one = torch.ones((), device=asked.device)
    turned = b.t()  # the second operand lies by columns
    return lambda: torch._scaled_mm(a, turned, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _block(name: str, tokens: int, width: int, asked: Asked) -> float:
    """The linear layers of a block, with the two products of each one's backward."""
    flops, seconds = 0, 0.0
    for inner, outer in (
        (width, 3 * width),
        (width, width),
        (width, 4 * width),
        (4 * width, width),
    ):
        x = asked.random(tokens, inner, dtype=_type(name))
        weight = asked.random(outer, inner, dtype=_type(name))
        grad = asked.random(tokens, outer, dtype=_type(name))
        # Bound now: a closure of the loop's names would see the last ones.
        for product in (
            lambda x=x, weight=weight: x @ weight.t(),
            lambda grad=grad, weight=weight: grad @ weight,
            lambda grad=grad, x=x: grad.t() @ x,
        ):
            seconds += seconds_of(product, asked)
            flops += 2 * tokens * inner * outer
    return flops / seconds
