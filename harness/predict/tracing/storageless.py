"""What the real set-up needs to run on tensors without storage; undone at the end.

Each stand-in says what it replaces and why. None changes what is allocated on a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["storageless"]


@contextlib.contextmanager
def storageless() -> Iterator[None]:
    """Patch for the length of a prediction; engines bring their own (``Imitation.stand_ins``)."""
    with contextlib.ExitStack() as stack:
        for target, name, stand_in in _patches():
            stack.enter_context(mock.patch.object(target, name, stand_in))
        # copy.deepcopy of a fake tensor copies its mode too, and another mode's operations would
        # give each view of the copy memory of its own.
        same = mock.patch.object(FakeTensorMode, "__deepcopy__", lambda mode, _: mode, create=True)
        stack.enter_context(same)
        yield


def _patches() -> list[tuple[Any, str, Any]]:
    from harness.worker import building

    return [
        # Weights without storage have no bytes to hash.
        (building, "tensor_digest", lambda tensor: "not computed"),
        (torch.nn.Module, "_apply", apply_in_place),
        (torch, "Generator", HostGenerator),
        # It would read from a tensor without values whether gradients overflowed.
        (torch.amp.GradScaler, "_maybe_opt_step", step_always),
    ]


def apply_in_place(self: torch.nn.Module, fn: Callable, recurse: bool = True) -> torch.nn.Module:
    """``Module._apply`` for fake tensors, which the original refuses to swap.

    As in the original a parameter stays the same object: an optimizer made before goes on
    pointing to it.
    """
    if recurse:
        for child in self.children():
            child._apply(fn)
    for p in self._parameters.values():
        if p is None:
            continue
        with torch.no_grad():
            moved = fn(p)
            if moved is not p:
                _become(p, torch.nn.Parameter(moved, p.requires_grad))
            if getattr(p, "quant_state", None) is not None:
                p.quant_state.to(p.device)  # as bitsandbytes' own parameter moves its scales
    for name, b in self._buffers.items():
        if b is not None:
            self._buffers[name] = fn(b)
    return self


def _become(p: Any, other: Any) -> None:
    """``torch.utils.swap_tensors`` without its check: fake tensors always have weak references,
    and these stay right, for the Python object stays the same."""
    torch._C._swap_tensor_impl(p, other)
    p.fake_device, other.fake_device = other.fake_device, p.fake_device


class HostGenerator(torch.Generator):
    """A generator on the CPU whatever device is asked for: meta has none, and draws nothing."""

    def __new__(cls, device: Any = "cpu") -> HostGenerator:
        return super().__new__(cls, "cpu")


def step_always(self: Any, optimizer: Any, optimizer_state: Any, *given: Any, **more: Any) -> Any:
    """``GradScaler._maybe_opt_step`` where no gradient overflowed."""
    return optimizer.step(*given, **more)
