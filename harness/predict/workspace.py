"""What kernels and libraries take beside the tensors that a trace sees. No torch.

Inside an op (``scratch``): bytes held while its kernel runs. Beside the training (``standing``):
workspaces, the CUDA context and communication buffers, which no trace shows; the figures of the
last two are typical ones, where the card was not calibrated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.calibration.record import StandingBytes
from harness.predict.speed.cards import Card

__all__ = ["Standing", "libraries", "scratch", "standing"]

MIB = 2**20
FLOAT = 4


def scratch(op: str, shapes: Sequence[Sequence[int]]) -> int:
    """Bytes that a CUDA kernel of ``op`` allocates and frees inside; shapes are its inputs'.

    Flash attention's backward sums dQ in float32, padded to its tiles, with one number a row.
    Source: torch 2.13, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (mha_bwd).
    cuDNN's does the same unpadded; its library may take more, of which nothing is published.
    Source: cudnn-frontend 1.23, node/scaled_dot_product_flash_attention.h (dQ_accum, softmax_sum);
    torch gives both out of the caching allocator (aten/src/ATen/native/cudnn/MHA.cpp).
    """
    if op == "aten._scaled_dot_product_flash_attention_backward.default":
        batch, heads, tokens, width = shapes[1]
        rows = batch * heads * _up(tokens, 128)
        return FLOAT * rows * (_up(width, 32) + 1)
    if op == "aten._scaled_dot_product_cudnn_attention_backward.default":
        batch, heads, tokens, width = shapes[1]
        return FLOAT * batch * heads * tokens * (width + 1)
    if op == "aten._scaled_dot_product_efficient_attention_backward.default":
        batch, heads, tokens, _ = shapes[1]
        return FLOAT * batch * heads * _up(tokens, 32)
    return 0


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Bytes that stand beside the training on every GPU. ``libraries`` comes out of the caching
    allocator, the other two do not."""

    libraries: int
    context: int
    communication: int

    @property
    def total(self) -> int:
        return self.libraries + self.context + self.communication


def libraries(gpu: Card | None) -> int:
    """What libraries take out of the caching allocator; None is a card that is not in the table.

    cuBLAS: one workspace a handle, and the forward and the autograd thread have one each
    (torch 2.13, aten/src/ATen/cuda/CublasHandlePool.cpp: 8.125 MiB, 32 MiB from Hopper on).
    """
    if gpu and gpu.shared:
        return 0
    typical = int(2 * (32 if gpu and gpu.hopper else 8.125) * MIB)
    return _or(measured(gpu).libraries, typical)


def standing(gpu: Card | None, processes: int) -> Standing:
    """What stands beside a training of ``processes`` ranks."""
    known = measured(gpu)
    return Standing(
        libraries=libraries(gpu),
        context=_or(known.context, 450 * MIB),
        communication=0 if processes == 1 else _or(known.communication, 300 * MIB),
    )


def measured(gpu: Card | None) -> StandingBytes:
    """What the card's calibration knows of it; nothing of one without."""
    found = gpu.calibrated if gpu else None
    return found.calibration.standing if found else StandingBytes()


def _or(size: int | None, typical: int) -> int:
    return typical if size is None else size
