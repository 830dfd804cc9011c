"""One block's weights in host memory, and their place on the device while the block is at work.

Imports torch: import it where torch is there.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from strategies.async_host_copy import Leaving

ALIGNED = 512
"""Bytes to which a weight is aligned on the device, as torch's allocator aligns its own."""


class Taken(NamedTuple):
    """A parameter that was taken out of ``owner``, where it is called ``name``."""

    owner: nn.Module
    name: str
    parameter: nn.Parameter


class Weight(NamedTuple):
    """A weight of ``owner``: the parameter in host memory, which everybody sees between blocks, and
    the one on the device, with which the block computes."""

    owner: nn.Module
    name: str
    host: nn.Parameter
    here: nn.Parameter


class Flat:
    """Weights of one type, one behind the other: a tensor in host memory (pinned where there is
    CUDA), and one on the device whose storage has bytes only while they are there. What autograd
    keeps of the weights are views of it, and stays valid when it is filled again.
    """

    def __init__(self, taken: Sequence[Taken], device: torch.device) -> None:
        dtype, places, size = taken[0].parameter.dtype, [], 0
        unit = max(1, ALIGNED // dtype.itemsize)
        for one in taken:
            places.append(size)
            size += -(-one.parameter.numel() // unit) * unit
        self.host = torch.zeros(size, dtype=dtype)
        if device.type == "cuda":
            _pin(self.host)
        self.here = torch.empty(size, dtype=dtype, device=device)
        self.weights = [self._weight(*pair) for pair in zip(taken, places, strict=True)]
        self.release()

    def _weight(self, taken: Taken, place: int) -> Weight:
        p = taken.parameter
        mine, there = (flat[place:][: p.numel()].view(p.shape) for flat in (self.host, self.here))
        mine.copy_(p.detach())
        pair = (nn.Parameter(values, requires_grad=p.requires_grad) for values in (mine, there))
        return Weight(taken.owner, taken.name, *pair)

    @property
    def resident(self) -> int:
        """Bytes on the device now."""
        return self.here.untyped_storage().nbytes()

    def fetch(self) -> None:
        """Take memory on the device, and begin to fill it from host memory."""
        self.here.untyped_storage().resize_(self.here.nbytes)
        # Not a change of the weights: autograd's count of those must not see it.
        self.here.data.copy_(self.host, non_blocking=True)

    def release(self) -> None:
        """Give the memory on the device back; the values are those in host memory anyway."""
        self.here.untyped_storage().resize_(0)


def _pin(tensor: Tensor) -> None:
    """Pin the memory of a tensor for as long as it is there: as much as it has, where torch's own
    allocator takes the next power of two."""
    cuda, address = torch.cuda.cudart(), tensor.data_ptr()
    torch.cuda.check_error(cuda.cudaHostRegister(address, tensor.nbytes, 0))
    storage = tensor.untyped_storage()
    storage.registered = True  # read by harness.memory.tracer: no block of torch's allocator
    weakref.finalize(storage, cuda.cudaHostUnregister, address)


class Streamed:
    """The weights of one block that are in host memory.

    Args:
        taken: them, with values; emptied, for they are copied.
        device: of the training.
        lane: CUDA's stream for copies in; None where there is no CUDA.
        leaving: what copies out, for all blocks.
        averaged: makes of a gradient of this rank what the optimizer is to get.
        moved: counts copies ("in" blocks, "out" gradients) and their bytes.
    """

    def __init__(
        self,
        taken: list[Taken],
        device: torch.device,
        lane: Any,
        leaving: Leaving,
        averaged: Callable[[Tensor], Tensor],
        moved: Counter[str],
    ) -> None:
        alike: dict[torch.dtype, list[Taken]] = {}
        while taken:
            one = taken.pop(0)
            alike.setdefault(one.parameter.dtype, []).append(one)
        self.flats = [Flat(some, device) for some in alike.values()]
        self.device, self.lane, self.leaving = device, lane, leaving
        self.averaged, self.moved, self.ready = averaged, moved, None
        self.there = False
        for weight in self.weights:
            if weight.host.requires_grad:
                hook = functools.partial(Streamed._arrived, self, weight.host)
                weight.here.register_post_accumulate_grad_hook(hook)

    @property
    def weights(self) -> list[Weight]:
        """All of them, by type."""
        return [weight for flat in self.flats for weight in flat.weights]

    @property
    def size(self) -> int:
        """Bytes that they take on the device."""
        return sum(flat.here.nbytes for flat in self.flats)

    @property
    def resident(self) -> int:
        """Bytes that they take on the device now."""
        return sum(flat.resident for flat in self.flats)

    def register(self, *, here: bool) -> None:
        """Let the block's modules see the weights ``here``, or those in host memory."""
        for weight in self.weights:
            weight.owner._parameters[weight.name] = weight.here if here else weight.host

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """While it lasts the block's modules see the weights on the device.

        Autocast keeps no copy of them: its own outlives the block.
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
        """Begin to copy them to the device, if they are not there: where there is CUDA beside what
        is computed by then, into memory whose last use lies before."""
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
        self.moved.update({"in": 1, "in_bytes": self.size})

    def wait(self) -> None:
        """What is computed from now on finds them on the device."""
        if self.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(self.ready)

    def release(self) -> None:
        """Let them go from the device."""
        for flat in self.flats:
            flat.release()
        self.there = False

    def _arrived(self, host: nn.Parameter, here: nn.Parameter) -> None:
        self.leave(host, here)  # looked up now: a trace puts its own around it

    def leave(self, host: nn.Parameter, here: nn.Parameter) -> None:
        """A gradient is there: it goes to where the weight lives, on top of those of earlier micro
        batches, which come back for the sum."""
        gradient, here.grad = here.grad, None
        with torch.no_grad():
            if host.grad is not None:
                gradient.add_(host.grad.to(gradient.device, non_blocking=True))
            gradient = self.averaged(gradient)
            out = torch.empty_like(gradient, device="cpu", pin_memory=gradient.is_cuda)
            self.leaving.copy(gradient, out)
        host.grad = out
        self.moved.update({"out": 1, "out_bytes": gradient.nbytes})
