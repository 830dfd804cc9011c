"""What the real set-up needs to run on tensors without storage; undone at the end.

Each stand-in says what it replaces and why. None changes what is allocated on a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

__all__ = ["storageless"]


@contextlib.contextmanager
def storageless(deepspeed: bool, stepped: Callable[[int], None]) -> Iterator[None]:
    """Patch for the length of a prediction.

    Args:
        deepspeed: its modules too.
        stepped: told of the bytes that an optimizer's left-out CPU kernel would have moved.
    """
    with contextlib.ExitStack() as stack:
        for target, name, stand_in in _patches(deepspeed, stepped):
            stack.enter_context(mock.patch.object(target, name, stand_in))
        yield


def _patches(deepspeed: bool, stepped: Callable[[int], None]) -> list[tuple[Any, str, Any]]:
    from harness import setup

    found = [
        # Weights without storage have no bytes to hash.
        (setup, "weights_digest", lambda module: "not computed"),
        (torch.nn.Module, "_apply", apply_in_place),
        (torch, "Generator", HostGenerator),
        # It asks a value that is not there whether gradients overflowed.
        (torch.amp.GradScaler, "_maybe_opt_step", step_always),
    ]
    return found + (_deepspeed_patches(stepped) if deepspeed else [])


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


class NoKernel:
    """DeepSpeed's compiled CPU optimizers without their kernel: the state is theirs, the
    arithmetic is left out. Any method may be called; it reads and writes what it is given."""

    def __init__(self, stepped: Callable[[int], None]) -> None:
        self.stepped = stepped

    def __getattr__(self, name: str) -> Callable[..., int]:
        def left_out(*given: Any, **more: Any) -> int:
            tensors = [t for t in given if isinstance(t, torch.Tensor)]
            self.stepped(2 * sum(t.numel() * t.element_size() for t in tensors))
            return 0

        return left_out


def _deepspeed_patches(stepped: Callable[[int], None]) -> list[tuple[Any, str, Any]]:
    from deepspeed.ops.op_builder import CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder
    from deepspeed.runtime.zero import linear, partition_parameters, stage3
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    kernels = [
        (builder, "load", lambda self, verbose=True: NoKernel(stepped))
        for builder in (CPUAdamBuilder, CPUAdagradBuilder, CPULionBuilder)
    ]
    # Compares numbers that the ranks really exchange; the ranks of this world are not there.
    asks = [
        (module, "assert_ints_same_as_other_ranks", lambda ints: None)
        for module in (partition_parameters, coordinator, stage3)
    ]
    # ZeRO-3's linear layer asks for autocast by the name of the device.
    autocast = [
        (linear, "_is_autocast_enabled", lambda kind: torch.is_autocast_enabled(_known(kind))),
        (linear, "_get_autocast_dtype", lambda kind: torch.get_autocast_dtype(_known(kind))),
    ]
    return kernels + asks + autocast


def _known(device_type: str) -> str:
    return "cuda" if device_type == "meta" else device_type
