"""Linear layer that packs its weight 2:4 in each forward. Imports torch and torchao."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torchao.sparsity.training import SemiSparseLinear
from torchao.sparsity.training.autograd import semi_structured_sparsify


class Packed24(SemiSparseLinear):
    """torchao's layer in autocast's type, if autocast is on.

    torchao's own forward packs float32 weights, which have no sparse product.
    """

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        weight = semi_structured_sparsify(self.weight.to(dtype), backend="cusparselt")
        return F.linear(x.to(dtype), weight, self.bias.to(dtype))


def zeros_of_four(layer: Packed24) -> Tensor:
    """Return the number of groups of four in a row with 0, 1, 2, 3 and 4 zeros in the packed
    weight: (5,)."""
    weight = layer.weight.detach().bfloat16()
    packed = semi_structured_sparsify(weight, backend="cusparselt")
    # The product with the identity is the packed weight, whatever its layout.
    eye = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
    groups = F.linear(eye, packed).t().reshape(-1, 4)
    return torch.bincount((groups == 0).sum(dim=1), minlength=5)
