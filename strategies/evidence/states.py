"""What an optimizer keeps, read back: bytes an element, its settings, its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strategies.base import demand
from strategies.engine import Trained
from strategies.evidence.stored import bytes_of, tensors, wrapped

if TYPE_CHECKING:
    import torch

__all__ = ["agree", "count_steps", "counted", "each_count", "first_moment", "per_element", "steps"]


def per_element(trained: Trained) -> float:
    """Bytes of optimizer state for each element that this rank's optimizer updates."""
    return bytes_of(tensors(trained.inner_optimizer)) / sum(w.numel() for w in trained.optimized())


def agree(trained: Trained, **wanted: Any) -> None:
    """Demand these settings in every group of the optimizer; numbers may be tensors there."""
    for group in trained.inner_optimizer.param_groups:
        for key, value in wanted.items():
            actual = group.get(key)
            # torchao keeps its learning rate in a float32 tensor.
            near = abs(float(actual) - value) <= 1e-6 * abs(value) if key == "lr" else None
            same = near if near is not None else _plain(actual) == _plain(value)
            demand(same, f"the optimizer's {key} is {actual}, not {value}")


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


def counted(trained: Trained) -> int | None:
    """Optimizer steps by the highest count in the optimizer's state; None where it has none."""
    counts = [s["step"] for s in trained.inner_optimizer.state.values() if "step" in s]
    return int(max(map(float, counts))) if counts else None


def each_count(trained: Trained) -> list[int]:
    """Optimizer steps by the state of each weight, or piece, that the optimizer updates on this
    rank: 0 where it has none. Empty where no state keeps a count."""
    counts = []
    for _, weight in trained.engine.shards(trained):
        if weight.numel():
            counts.append(int(trained.engine.state_of(trained, weight).get("step", 0)))
    return counts if any(counts) else []


def first_moment(trained: Trained, weight: torch.Tensor) -> torch.Tensor | None:
    """The running mean of the gradients of a weight, or piece, that the optimizer updates; None
    where it keeps none as plain numbers."""
    state = trained.engine.state_of(trained, weight)
    named = (state.get(name) for name in ("exp_avg", "momentum_buffer"))
    found = next((moment for moment in named if moment is not None), None)
    plain = found is not None and found.is_floating_point() and not wrapped((type(found),))
    return found if plain and found.numel() == weight.numel() else None


def steps(trained: Trained) -> int:
    """Steps that the optimizer's own state counts: none was skipped, none taken twice."""
    taken = counted(trained)
    demand(taken is not None, "the optimizer holds no state: it never stepped")
    demand(
        taken == trained.optimizer_steps,
        f"the optimizer stepped {taken} times, the loop {trained.optimizer_steps}",
    )
    return taken


def count_steps(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let an optimizer that keeps no count of its steps keep one as Adam does, a parameter each."""

    def count(stepped: Any, *_: Any) -> None:
        for group in stepped.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    stepped.state[p]["step"] = stepped.state[p].get("step", 0) + 1

    optimizer.register_step_post_hook(count)
    return optimizer
