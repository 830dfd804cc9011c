"""FLOP formulas: torch's table, corrected and completed."""

from __future__ import annotations

import sys
from typing import Any


def formulas() -> dict[Any, Any]:
    """Return operator -> formula, which takes the operator's arguments and its output as
    ``out_val``."""
    from torch.utils.flop_counter import flop_registry

    return {**flop_registry, **_own()}


def _own() -> dict[Any, Any]:
    """Return operator -> formula for operators that torch's own table (2.13) omits or counts
    wrongly."""
    import torch
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    # On a CPU fused attention is an operator of its own, with the operands of the flash kernel.
    alike = {
        aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            aten._scaled_dot_product_flash_attention_backward
        ),
    }
    found = {op: _raw(flop_registry[same]) for op, same in alike.items() if op not in flop_registry}
    found[aten.convolution_backward] = _raw(_convolution_backward)
    found[aten._int_mm] = _raw(flop_registry[aten.mm])
    if "bitsandbytes" in sys.modules:
        found[torch.ops.bitsandbytes.gemm_4bit] = _raw(_four_bits)
    try:
        from torch.nn.modules import linear_cross_entropy  # noqa: F401 (it defines the operation)
    except ImportError:  # an older torch has no such loss
        return found
    return found | {torch.ops.torch_nn._linear_cross_entropy_batch_chunked: _raw(_fused_loss)}


def _convolution_backward(grad: Any, x: Any, weight: Any, *given: Any, **_: Any) -> int:
    """Count the forward pass's multiply-adds for each requested gradient of an operand. torch's
    formula leaves out the groups (torch 2.13, utils/flop_counter.py, ``conv_backward_flop``)."""
    from torch.utils.flop_counter import conv_flop_count

    transposed, wanted = given[4], given[7]
    forward = conv_flop_count(x.shape, weight.shape, grad.shape, transposed=transposed)
    return forward * (bool(wanted[0]) + bool(wanted[1]))


def _four_bits(x: Any, codes: Any, shape: Any, *_: Any, **__: Any) -> int:
    """Count bitsandbytes' product by a weight [out, in] in 4 bits."""
    return 2 * x.numel() * shape[0]


def _fused_loss(x: Any, weight: Any, *given: Any, **_: Any) -> int:
    """Count the logits, and the gradients of both operands that are requested, by the last four
    operands, and computed with them."""
    products = 1 + sum(bool(wanted) for wanted in given[-3:-1])
    return 2 * x.shape[0] * weight.shape[0] * weight.shape[1] * products


def _raw(formula: Any) -> Any:
    """Mark ``formula`` as one that takes tensors; torch's counter wraps the others."""

    def count(*given: Any, **named: Any) -> Any:
        return formula(*given, **named)

    count._get_raw = True  # type: ignore[attr-defined]  # torch reads it
    return count


def counting() -> Any:
    """Return a ``FlopCounterMode`` that counts by ``formulas``."""
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False, custom_mapping=_own())
