"""Activations in host memory between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.activations.host import LEAST_BYTES, Host
from strategies.activations.parts import Recompute
from strategies.activations.runners import runner_of, surround
from strategies.base import Attachment, Slot, Watcher, demand
from strategies.engine import Launch, Trained
from strategies.holdings import Maker
from strategies.strategy import Strategy
from strategies.subject import Subject

__all__ = ["OffloadActivations"]


class Copies(Watcher):
    """Which methods of ``Host`` allocate in host memory, and which on the device."""

    def makers(self) -> tuple[Maker, ...]:
        """What leaves is copied to the host by one, what comes back to the device by the other."""
        out = Maker(Host, "pack", "", place="host", pinned=True)
        return out, Maker(Host, "_fetch", "", place="device")


@dataclass(frozen=True, kw_only=True)
class OffloadActivations(Strategy):
    """Keeps activations in host memory between forward and backward: ``all`` that the blocks keep,
    or, beside checkpoint, the ``checkpoints`` alone. On a GPU the memory is pinned and the copies
    overlap the computation; without one host and device are the same memory and nothing is saved.
    """

    name: ClassVar[str] = "offload_activations"
    slot: ClassVar[Slot] = Slot.OFFLOAD
    source: ClassVar[str] = (
        "Rajbhandari et al. 2021, ZeRO-Infinity (arXiv:2104.07857), section 5.1.2; "
        "torch.autograd.graph.save_on_cpu"
    )

    what: str = "all"

    def __post_init__(self) -> None:
        if self.what not in ("all", "checkpoints"):
            raise ValueError(f"what is {self.what!r}; one of all, checkpoints")

    def traits(self) -> frozenset[str]:
        return frozenset({"moves_activations"})

    def refuses(self, launch: Launch) -> str | None:
        if self.what == "checkpoints" and "recomputes" not in launch.traits:
            return "there are no checkpoints to offload; add checkpoint, or take what=all"
        if self.what == "all" and "recomputes" in launch.traits:
            return "what is recomputed is not kept; take what=checkpoints, or leave checkpoint out"
        return None

    def edit_model(self, module: Any, subject: Subject) -> None:
        surround(module, subject, Host)

    def attach(self, trained: Trained) -> Attachment:
        return Copies()

    def evidence(self, trained: Trained) -> dict[str, Any]:
        host, depth = runner_of(trained.module, Host), len(trained.blocks())
        demand(host is not None, "the blocks' activations stay on the device")
        demand(host.blocks == depth, f"those of {host.blocks} of {depth} blocks leave the device")
        moved, steps = host.moved, trained.micro_steps
        demand(
            (moved["out"], moved["out_bytes"]) == (moved["back"], moved["back_bytes"]),
            f"{moved['out']} tensors left the device, {moved['back']} came back",
        )
        tensors, size = moved["out"] / steps, moved["out_bytes"] / steps
        inner = runner_of(trained.module, Recompute)
        parts = inner.parts_run / steps if inner else 0
        # Beside checkpoint a part keeps its inputs (compiled, the generator's state as well); else
        # a block keeps a dozen tensors.
        inputs = parts * max(len(call.tensors) for call in host.calls)
        least, most = (
            (parts, inputs + depth) if self.what == "checkpoints" else (2 * depth, 99 * depth)
        )
        demand(max(least, 1) <= tensors <= most, f"{tensors} tensors left the device a micro step")
        demand(size >= host.kept_bytes - LEAST_BYTES * tensors, "not all that is kept was moved")
        cuda = trained.launch.device == "cuda"
        demand(moved["pinned"] == (moved["out"] if cuda else 0), "the host memory is not pinned")
        return {
            "tensors": tensors,
            "bytes_out": size,
            "bytes_back": moved["back_bytes"] / steps,
            "pinned": cuda,
            "host_is_device": not cuda,
        }
