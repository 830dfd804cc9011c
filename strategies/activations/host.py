"""Kept tensors moved to host memory and back, beside the computation."""

from __future__ import annotations

from typing import Any

from strategies.activations.weighed import Weighed, is_weight
from strategies.leaving import Leaving

__all__ = ["LEAST_BYTES", "Host"]

LEAST_BYTES = 1024
"""Below this a copy costs more than it frees."""
AHEAD = 4
"""Tensors fetched ahead of the one that backward asks for."""


class Offloaded:
    """A kept tensor in host memory; once ``fetched`` is set, its copy back has begun."""

    __slots__ = ("device", "fetched", "host", "ready")

    def __init__(self, host: Any, device: Any) -> None:
        self.host, self.device = host, device
        self.fetched = self.ready = None

    def wait(self) -> None:
        """What is computed from now on comes behind the copy."""
        if self.ready is not None:
            import torch

            torch.cuda.current_stream(self.device).wait_event(self.ready)
            self.ready = None

    __del__ = wait  # the memory of a copy that nobody asked for may be given away only then


class Host(Weighed):
    """Runs the blocks; what autograd keeps for them waits in host memory.

    On a GPU the copies are made on a stream of their own from and to pinned memory, beside the
    computation: out as tensors are kept, back ``AHEAD`` of them before they are asked for. All
    memory of the device is taken and given back in the order of what computes (``Leaving``). Where
    the device is the host itself the copies are made all the same, and free nothing.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.moved = {"out": 0, "back": 0, "out_bytes": 0, "back_bytes": 0, "pinned": 0}
        self.stays: list[Offloaded | None] = []
        self.leaving = Leaving(None)
        self.device = "cpu"

    def run(self, blocks: Any, *given: Any, **named: Any) -> Any:
        import torch

        self.stays = []
        device = _device_of(given, named)
        self.device = device.type
        if device.type == "cuda" and self.leaving.stream is None:
            self.leaving = Leaving(torch.cuda.Stream(device))
        pack, unpack = (torch.compiler.disable(f) for f in (self.pack, self.unpack))
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self.inner(blocks, *given, **named)

    def pack(self, kept: Any) -> Any:
        """A tensor that autograd keeps -> its place in host memory; weights stay where they are."""
        import torch

        if kept.device.type == "cpu" != self.device:
            return kept  # an operation may save a tensor that is in host memory anyway
        if self.weighing:
            self.weigh(kept)
        if is_weight(kept) or kept.nbytes < LEAST_BYTES:
            return kept
        host = torch.empty_like(kept, device="cpu", pin_memory=kept.is_cuda)
        self.leaving.copy(kept, host)
        self.stays.append(Offloaded(host, kept.device))
        self.moved["out"] += 1
        self.moved["out_bytes"] += kept.nbytes
        self.moved["pinned"] += kept.is_cuda and host.is_pinned()
        return len(self.stays) - 1, self.stays

    def unpack(self, packed: Any) -> Any:
        """What ``pack`` returned -> the tensor, on its device again."""
        if not isinstance(packed, tuple):
            return packed
        self.leaving.let_go()
        index, stays = packed
        for nearer in range(index, max(-1, index - 1 - AHEAD), -1):
            self._fetch(stays[nearer])
        stay, stays[index] = stays[index], None
        stay.wait()
        self.moved["back"] += 1
        self.moved["back_bytes"] += stay.fetched.nbytes
        return stay.fetched

    def _fetch(self, stay: Offloaded | None) -> None:
        """Begin to copy a tensor back; on the stream this comes after the copy out."""
        import torch

        if stay is None or stay.fetched is not None:
            return
        # Memory of the computing stream: given back there, it needs no event to be used again.
        stay.fetched, stream = torch.empty_like(stay.host, device=stay.device), self.leaving.stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stay.device))
        with torch.cuda.stream(stream):
            stay.fetched.copy_(stay.host, non_blocking=True)
        if stream is not None:
            stay.ready = stream.record_event()


def _device_of(*given: Any) -> Any:
    """Where a block works: where the first tensor is that it is given."""
    import torch
    from torch.utils._pytree import tree_leaves

    return next(leaf.device for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
