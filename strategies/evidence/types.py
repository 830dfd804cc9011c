"""The types that a step computes with and keeps, and how exact its products are."""

from __future__ import annotations

from typing import Any

from strategies.engine import Trained
from strategies.evidence import forward
from strategies.evidence.stored import wrapped

__all__ = ["dtypes", "product_error", "products"]

ROWS = 16


def dtypes(trained: Trained) -> dict[str, str]:
    """Types of computation, stored parameters and the optimizer's weights and moments."""
    state = trained.inner_optimizer.state
    moments = {
        str(v.dtype) for s in state.values() for k, v in s.items() if k.startswith("exp_avg")
    }
    weights = {str(w.dtype) for w in trained.optimized()}
    # Packed codes are no type to compute in; whoever packed them shows what they are.
    stored = {str(p.dtype) for p in trained.module.parameters() if p.is_floating_point()}
    kinds = {"parameters": stored, "master": weights, "moments": moments}
    return {
        "compute_dtype": forward.compute_dtype(trained),
        **{k: "+".join(sorted(w.removeprefix("torch.") for w in v)) for k, v in kinds.items()},
    }


def products(trained: Trained) -> dict[str, Any]:
    """Matrix products of forward and backward of the watched step, counted by type; nothing where
    none was watched."""
    if trained.observed is None or not trained.observed.ran:
        return {}
    return {"products": dict(trained.observed.products("forward", "backward"))}


def product_error(trained: Trained) -> float | None:
    """How far a product of the model is from float64's, as a share of its norm: the first plain
    linear layer of the blocks, on rows that it is given; None where there is none."""
    import torch
    from torch import nn

    layers = [trained.module.get_submodule(name) for name in trained.linears]
    plain = (la for la in layers if type(la) is nn.Linear and not wrapped((type(la.weight),)))
    first = next(plain, None)
    if first is None:
        return None
    seen: list[Any] = []

    def wanted(layer: Any, given: Any) -> None:
        # Before the call: an engine may take the weight away behind it.
        rows = given[0].detach().flatten(0, -2)[:ROWS].double()
        bias = 0.0 if layer.bias is None else layer.bias.detach().double()
        seen.append(rows @ layer.weight.detach().double().T + bias)

    def found(layer: Any, given: Any, out: Any) -> None:
        exact = seen.pop()
        seen.append((out.detach().flatten(0, -2)[:ROWS].double() - exact).norm() / exact.norm())

    handles = [first.register_forward_pre_hook(wanted), first.register_forward_hook(found)]
    try:
        with forward.eager(trained), torch.no_grad():
            forward.forward_once(trained)
    finally:
        for handle in handles:
            handle.remove()
    return float(seen[-1]) if seen else None
