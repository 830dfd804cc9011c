"""What an optimizer keeps, read back: its tensors by their true bytes, its settings, its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from strategies.base import Trained, demand

if TYPE_CHECKING:
    import torch

__all__ = [
    "agree",
    "bytes_of",
    "count_steps",
    "per_element",
    "steps",
    "stored",
    "tensors",
    "wrapped",
]


def stored(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that hold ``tensor``'s bytes.

    A low-bit state is a subclass that looks like float32 and wraps codes, scales and a table. A
    sparse tensor is its indices and values.
    """
    if wrapped((type(tensor),)):
        for name in tensor.__tensor_flatten__()[0]:
            yield from stored(getattr(tensor, name))
    elif tensor.is_sparse:
        yield from (tensor._indices(), tensor._values())
    else:
        yield tensor


def wrapped(types: Iterable[type]) -> bool:
    """Whether one of an operation's types of operands wraps the tensors that hold its bytes.

    A dispatch mode is off while it calls such an operation, so it never sees what the subclass
    calls inside. If the mode gives way (returns NotImplemented) the subclass unwraps first, and
    the mode sees the operations on plain tensors. FakeTensor and its like have nothing inside.
    """
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def tensors(optimizer: Any) -> list[torch.Tensor]:
    """Every plain tensor in an optimizer's state."""
    import torch

    found = [v for state in optimizer.state.values() for v in state.values()]
    return [t for v in found if isinstance(v, torch.Tensor) for t in stored(v)]


def bytes_of(found: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind these tensors; one that several share counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(storages.values())


def per_element(trained: Trained) -> float:
    """Bytes of optimizer state for each element that this rank's optimizer updates."""
    return bytes_of(tensors(trained.inner_optimizer)) / sum(w.numel() for w in trained.optimized())


def agree(trained: Trained, **asked: Any) -> None:
    """Demand these settings in every group of the optimizer; numbers may be tensors there."""
    for group in trained.inner_optimizer.param_groups:
        for key, value in asked.items():
            found = group.get(key)
            # torchao keeps its learning rate in a float32 tensor.
            near = abs(float(found) - value) <= 1e-6 * abs(value) if key == "lr" else None
            same = near if near is not None else _plain(found) == _plain(value)
            demand(same, f"the optimizer's {key} is {found}, not {value}")


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


def steps(trained: Trained) -> int:
    """Steps that the optimizer's own state counts: none was skipped, none taken twice."""
    counts = [s["step"] for s in trained.inner_optimizer.state.values() if "step" in s]
    demand(bool(counts), "the optimizer holds no state: it never stepped")
    taken = int(max(map(float, counts)))
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
