"""sparse24: two of each four weights in a row are zero, which a GPU's sparse tensor cores skip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Slot, demand
from strategies.engine import TrainingRun
from strategies.strategy import Strategy
from strategies.subject import Subject

PRODUCTS = {
    "cusparselt_mm",
    "cutlass_mm",
    "_cslt_sparse_mm",
    "_sparse_semi_structured_mm",
    "_sparse_semi_structured_addmm",
    "_sparse_semi_structured_linear",
}
"""Names of torch's 2:4 products: the first two since 2.13, the others in their implementations.

Packing operators have similar names, and prove nothing.
"""


@dataclass(frozen=True, kw_only=True)
class Sparse24(Strategy):
    """Packs linear weights 2:4 anew in each forward.

    Gradients pass to all weights.

    The trained weights stay dense. It is for speed, and the packed copies take memory.
    """

    name: ClassVar[str] = "sparse24"
    slot: ClassVar[Slot] = Slot.SPARSIFY
    alters: ClassVar[tuple[str, ...]] = ("forward",)
    source: ClassVar[str] = "Mishra et al. 2021 (arXiv:2104.08378); torchao.sparsity.training"
    needs: ClassVar[tuple[str, ...]] = ("torchao", "sparse24")
    reads_weights: ClassVar[bool] = True

    def traits(self) -> frozenset[str]:
        return frozenset({"other_products", "replaced_layers"})

    def edit_model(self, module: Any, subject: Subject) -> None:
        from strategies.sparsity.packed24 import Packed24

        for name in subject.linears:
            linear = module.get_submodule(name)
            module.set_submodule(name, Packed24.from_dense(linear))

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        from strategies.sparsity.packed24 import Packed24

        layers = [m for m in run.module.modules() if isinstance(m, Packed24)]
        wanted = len(run.subject.linears)
        demand(len(layers) == wanted, f"{len(layers)} layers are packed, expected {wanted}")
        ran = sorted(op for op in run.ops if op.split(".")[1] in PRODUCTS)
        demand(not run.ops or bool(ran), "no sparse product ran in the traced step")
        return {"layers": len(layers), "ops": ran}
