"""Linear layer that packs its weight 2:4 in each forward. Imports torch and torchao."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F
from torchao.sparsity.training import SemiSparseLinear
from torchao.sparsity.training.autograd import semi_structured_sparsify

from strategies.precision.autocast import autocast_dtype


class Packed24(SemiSparseLinear):
    """torchao's layer in autocast's type, if autocast is on.

    torchao's own forward packs float32 weights, which have no sparse product.
    """

    def forward(self, x: Tensor) -> Tensor:
        dtype = autocast_dtype(x) or x.dtype
        weight = semi_structured_sparsify(self.weight.to(dtype), backend="cusparselt")
        return F.linear(x.to(dtype), weight, self.bias.to(dtype))
