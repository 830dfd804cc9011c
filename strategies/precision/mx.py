"""Linear layer whose products take MXFP8 operands. Imports torch and torchao's prototypes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear, mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from strategies import initial
from strategies.precision.autocast import autocast_dtype

FLOAT8 = torch.float8_e4m3fn
BLOCK = 32


class MxLinear(MXFP8Linear):
    """torchao's layer, in autocast's type, whose casts are torch's operators.

    Its own forward takes kernels of CUDA for the casts of backward, also if it emulates.
    """

    @classmethod
    def of(cls, linear: nn.Linear, emulate: bool) -> MxLinear:
        """Return ``linear`` with its own weight and bias."""
        preference = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
        with initial.valueless():
            made = cls(linear.in_features, linear.out_features, False, kernel_preference=preference)
        made.weight, made.bias = linear.weight, linear.bias
        return made

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(autocast_dtype(x) or x.dtype).contiguous()
        out = mx_mm.apply(
            x, self.weight.to(x.dtype), FLOAT8, FLOAT8, FLOAT8, BLOCK, self.kernel_preference,
            MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH,
            ScaleCalculationMode.RCEIL, False,
        )  # fmt: skip
        return out if self.bias is None else out + self.bias.to(out.dtype)
