"""Weights of one block in host memory, and their storage on the device while the block works.

Imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from strategies.async_host_copy import AsyncHostCopy

ALIGNED = 512
"""Alignment of a weight on the device in bytes, that of torch's allocator."""
Taken = tuple[nn.Module, str, nn.Parameter]
"""Parameter removed from a module: the module, the name of its attribute, and the parameter."""


class Weight(NamedTuple):
    """Weight of ``owner``, as two parameters: ``host`` in host memory, and ``here`` on the device.

    The module has ``host`` between blocks, and computes with ``here``.
    """

    owner: nn.Module
    name: str
    host: nn.Parameter
    here: nn.Parameter


class Flat:
    """Weights of one type, concatenated: a tensor in host memory (pinned with CUDA) and one on the
    device.

    The device tensor's storage has bytes only while the weights are there. Tensors that autograd
    keeps of the weights are views of it, and stay valid when it is filled again.
    """

    def __init__(self, taken: Sequence[Taken], device: torch.device) -> None:
        dtype, places, size = taken[0][2].dtype, [], 0
        unit = max(1, ALIGNED // dtype.itemsize)
        for _, _, p in taken:
            places.append(size)
            size += -(-p.numel() // unit) * unit
        self.host = torch.zeros(size, dtype=dtype)
        if device.type == "cuda":
            _pin(self.host)
        self.here = torch.empty(size, dtype=dtype, device=device)
        self.weights = []
        for (owner, name, p), place in zip(taken, places, strict=True):
            mine, there = (x[place:][: p.numel()].view(p.shape) for x in (self.host, self.here))
            mine.copy_(p.detach())
            # ``data`` has a version counter of its own: a step of one weight is none of its
            # neighbors.
            host, here = (nn.Parameter(v.data, p.requires_grad) for v in (mine, there))
            host.on_device = here  # read by Engine.shards
            self.weights.append(Weight(owner, name, host, here))
        self.release()

    def fetch(self) -> None:
        """Allocate the device storage, and begin to fill it from host memory."""
        self.here.untyped_storage().resize_(self.here.nbytes)
        # The weights do not change, so autograd's version counter must not either.
        self.here.data.copy_(self.host, non_blocking=True)

    def release(self) -> None:
        """Free the device storage; the values in host memory are the same."""
        self.here.untyped_storage().resize_(0)


def _pin(tensor: Tensor) -> None:
    """Pin a tensor's memory for its lifetime, without rounding its size up to the next power of
    two, as torch's own allocator does."""
    cuda, address = torch.cuda.cudart(), tensor.data_ptr()
    torch.cuda.check_error(cuda.cudaHostRegister(address, tensor.nbytes, 0))
    storage = tensor.untyped_storage()
    storage.registered = True  # harness.memory.tracer reads it: not from torch's allocator
    weakref.finalize(storage, cuda.cudaHostUnregister, address)


class Streamed:
    """Weights of one block in host memory.

    Args:
        taken: the weights, with values; emptied, since they are copied.
        device: of the training.
        lane: CUDA stream of the copies to the device; None without CUDA.
        host_copy: copier to host memory, shared by all blocks.
        averaged: maps a gradient of this rank to the one for the optimizer.
        fused: weights are stepped on the device, within backward; else in host memory, after it.
    """

    def __init__(
        self,
        taken: list[Taken],
        device: torch.device,
        lane: Any,
        host_copy: AsyncHostCopy,
        averaged: Callable[[Tensor], Tensor],
        fused: bool,
    ) -> None:
        alike: dict[torch.dtype, list[Taken]] = {}
        while taken:
            one = taken.pop(0)
            alike.setdefault(one[2].dtype, []).append(one)
        self.flats = [Flat(some, device) for some in alike.values()]
        self.weights = [weight for flat in self.flats for weight in flat.weights]
        self.size = sum(flat.here.nbytes for flat in self.flats)
        self.device, self.lane, self.host_copy = device, lane, host_copy
        self.averaged, self.fused, self.ready, self.there = averaged, fused, None, False
        self.register(here=False)
        for weight in self.weights:
            if weight.host.requires_grad:
                hook = functools.partial(Streamed._arrived, self, weight.host)
                weight.here.register_post_accumulate_grad_hook(hook)

    def register(self, *, here: bool) -> None:
        """Set the block's parameters to the device weights (``here``), or to those in host
        memory."""
        for weight in self.weights:
            weight.owner._parameters[weight.name] = weight.here if here else weight.host

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Set the block's parameters to the device weights inside the context.

        Autocast's cache is off, because its copies would outlive the block.
        """
        self.wait()
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        self.register(here=True)
        try:
            yield
        finally:
            self.register(here=False)
            torch.set_autocast_cache_enabled(cached)

    def fetch(self) -> None:
        """Begin to copy the weights to the device, unless they are there.

        With CUDA the copy overlaps with later computation, after the last use of its memory.
        """
        if self.there:
            return
        if self.lane is not None:
            self.lane.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(self.lane):
            for flat in self.flats:
                flat.fetch()
        if self.lane is not None:
            self.ready = self.lane.record_event()
        self.there = True

    def wait(self) -> None:
        """Make later computation wait for the copy to the device."""
        if self.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(self.ready)

    def release(self) -> None:
        """Free the weights' memory on the device, after their copies to host memory."""
        if self.fused:
            self.host_copy.let_go()
        for flat in self.flats:
            flat.release()
        self.there = False

    def _arrived(self, host: nn.Parameter, here: nn.Parameter) -> None:
        if not self.fused:
            self.leave(host, here)  # looked up now, because a trace wraps it
            return
        self.fetch()  # the optimizer steps it now, also if its gradient came after its block
        self.wait()

    def keep(self, weight: Weight) -> None:
        """Copy a weight that was stepped on the device to host memory."""
        with torch.no_grad():
            self.host_copy.copy(weight.here, weight.host)

    def leave(self, host: nn.Parameter, here: nn.Parameter) -> None:
        """Move a gradient to its weight's memory.

        It is added to that of earlier micro-batches, which is copied to the device for the sum.
        """
        gradient, here.grad = here.grad, None
        with torch.no_grad():
            if host.grad is not None:
                gradient.add_(host.grad.to(gradient.device, non_blocking=True))
            gradient = self.averaged(gradient)
            out = torch.empty_like(gradient, device="cpu", pin_memory=gradient.is_cuda)
            self.host_copy.copy(gradient, out)
        host.grad = out
