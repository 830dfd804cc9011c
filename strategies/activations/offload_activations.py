"""offload_activations: activations in host memory between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.activations.runners import MeasuredBlocks, is_weight, runner_of, surround
from strategies.async_host_copy import AsyncHostCopy
from strategies.base import Attachment, Slot, demand
from strategies.engine import TrainingRun
from strategies.inventory import AllocationScope
from strategies.strategy import Strategy
from strategies.subject import Subject

# ---- copies to and from host memory ----


LEAST_BYTES = 1024
"""Size below which a copy costs more than it frees."""
AHEAD = 4
"""Tensors fetched ahead of the one that backward needs."""


class Offloaded:
    """Saved tensor in host memory; once ``fetched`` is set, its copy back has begun."""

    __slots__ = ("device", "fetched", "host", "ready")

    def __init__(self, host: Any, device: Any) -> None:
        self.host, self.device = host, device
        self.fetched: Any = None
        self.ready: Any = None

    def wait(self) -> None:
        """Make later computation wait for the copy."""
        if self.ready is not None:
            import torch

            torch.cuda.current_stream(self.device).wait_event(self.ready)
            self.ready = None

    __del__ = wait  # the memory of an unused copy must not be reused earlier


class Host(MeasuredBlocks):
    """Block runner that keeps saved tensors in host memory.

    On a GPU the copies use a stream of their own and pinned memory, and overlap with computation:
    out when tensors are saved, back ``AHEAD`` tensors before they are needed. Device memory is
    allocated and freed in the order of the compute stream (``AsyncHostCopy``). If the device is the
    host, the copies are still made, and free nothing.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.moved = {"out": 0, "back": 0, "out_bytes": 0, "pinned": 0}
        self.stays: list[Offloaded | None] = []
        self.host_copy = AsyncHostCopy(None)
        self.device = "cpu"

    def run(self, blocks: Any, *given: Any, **named: Any) -> Any:
        import torch
        from torch.utils._pytree import tree_leaves

        self.stays = []
        leaves = tree_leaves((given, named))
        device = next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
        self.device = device.type
        if device.type == "cuda" and self.host_copy.stream is None:
            self.host_copy = AsyncHostCopy(torch.cuda.Stream(device))
        pack, unpack = (torch.compiler.disable(f) for f in (self.pack, self.unpack))
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self.inner(blocks, *given, **named)

    def pack(self, saved: Any) -> Any:
        """Copy a saved tensor to host memory and return its index; weights stay where they are."""
        import torch

        if saved.device.type == "cpu" != self.device:
            return saved  # an operator may save a tensor that is in host memory already
        if self.weighing:
            self.weigh(saved)
        if is_weight(saved) or saved.nbytes < LEAST_BYTES:
            return saved
        host = torch.empty_like(saved, device="cpu", pin_memory=saved.is_cuda)
        self.host_copy.copy(saved, host)
        self.stays.append(Offloaded(host, saved.device))
        self.moved["out"] += 1
        self.moved["out_bytes"] += saved.nbytes
        self.moved["pinned"] += saved.is_cuda and host.is_pinned()
        return len(self.stays) - 1, self.stays

    def unpack(self, packed: Any) -> Any:
        """Return the tensor of a ``pack`` result, on its device."""
        if not isinstance(packed, tuple):
            return packed
        self.host_copy.let_go()
        index, stays = packed
        for nearer in range(index, max(-1, index - 1 - AHEAD), -1):
            self._fetch(stays[nearer])
        stay, stays[index] = stays[index], None
        stay.wait()
        self.moved["back"] += 1
        return stay.fetched

    def _fetch(self, stay: Offloaded | None) -> None:
        """Begin to copy a tensor back; on the stream this follows the copy out."""
        import torch

        if stay is None or stay.fetched is not None:
            return
        # Memory of the compute stream, where it is freed: reuse needs no event.
        stay.fetched = torch.empty_like(stay.host, device=stay.device)
        stream = self.host_copy.stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stay.device))
        with torch.cuda.stream(stream):
            stay.fetched.copy_(stay.host, non_blocking=True)
        if stream is not None:
            stay.ready = stream.record_event()


class Copies(Attachment):
    """Attachment that reports the methods of ``Host`` that allocate in host memory and on the
    device."""

    def makers(self) -> tuple[AllocationScope, ...]:
        """Return the method that copies to the host, and the one that copies back to the device."""
        out = AllocationScope(Host, "pack", "", place="host", pinned=True)
        return out, AllocationScope(Host, "_fetch", "", place="device")


@dataclass(frozen=True, kw_only=True)
class OffloadActivations(Strategy):
    """Keeps activations in host memory until backward.

    ``what=all`` takes all that the blocks keep. ``what=checkpoints`` takes only the inputs that
    ``checkpoint`` keeps. On a GPU the memory is pinned, and the copies overlap the computation.
    Without a GPU host and device are the same memory, and nothing is saved.
    """

    name: ClassVar[str] = "offload_activations"
    slot: ClassVar[Slot] = Slot.OFFLOAD
    source: ClassVar[str] = (
        "Rajbhandari et al. 2021, ZeRO-Infinity (arXiv:2104.07857), section 5.1.2; "
        "torch.autograd.graph.save_on_cpu"
    )
    values: ClassVar[dict[str, Any]] = {"what": ("all", "checkpoints")}

    what: str = "all"

    def traits(self) -> frozenset[str]:
        return frozenset({"moves_activations"})

    def edit_model(self, module: Any, subject: Subject) -> None:
        surround(module, subject, Host)

    def attach(self, run: TrainingRun) -> Attachment:
        return Copies()

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        """Return the tensors and bytes that left the device in each micro-batch, and came back."""
        host, blocks = runner_of(run.module, Host), run.blocks()
        demand(host is not None, "the blocks' activations stay on the device")
        text = f"the activations of {len(host.blocks)} of {len(blocks)} blocks leave the device"
        demand(len(host.blocks) == len(blocks), text)
        moved, steps = host.moved, run.micro_steps
        out, back = moved["out"], moved["back"]
        demand(out == back > 0, f"{out} tensors were copied to the host, {back} back")
        tensors, size = out / steps, moved["out_bytes"] / steps
        lost = host.kept_bytes - size
        demand(lost <= LEAST_BYTES * tensors, "some kept activations stayed on the device")
        cuda = run.launch.device == "cuda"
        demand(moved["pinned"] == (out if cuda else 0), "the host memory is not pinned")
        return {"tensors": tensors, "bytes_out": size, "pinned": cuda}
