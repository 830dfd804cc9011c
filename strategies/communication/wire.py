"""DDP communication hooks with counted bytes: base classes and evidence of compressed gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, no_type_check

from strategies.base import Attachment, Slot, demand
from strategies.engine import TrainingRun
from strategies.strategy import Strategy

INPUTS = {"all_reduce": 0, "all_gather": 1}
"""Counted collective -> index of its input."""


class CountedCollectives:
    """``torch.distributed`` with the inputs of this rank's collectives counted, whatever a hook
    reports."""

    def __init__(self) -> None:
        self.bytes, self.types = 0, set[str]()

    def __getattr__(self, name: str) -> Any:
        import torch.distributed

        found = getattr(torch.distributed, name)
        if name not in INPUTS:
            return found

        def counting(*given: Any, **more: Any) -> Any:
            tensor = given[INPUTS[name]]
            self.bytes += tensor.nbytes
            self.types.add(str(tensor.dtype).removeprefix("torch."))
            return found(*given, **more)

        return counting


def counted_hooks() -> tuple[Any, Any, CountedCollectives]:
    """Return torch's hook modules, with their collectives counted from now on."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    counted = CountedCollectives()
    default_hooks.dist = powerSGD_hook.dist = counted
    return default_hooks, powerSGD_hook, counted


class Compression(Attachment):
    """Hook that replaces DDP's all-reduce, with the bytes of the last step, sent and uncompressed.

    ``hook`` takes a bucket and returns a future of its averaged buffer. ``storages`` are those of
    DDP's buckets in the last backward.
    """

    def __init__(
        self, trained: TrainingRun, hook: Callable[[Any], Any], wire: CountedCollectives
    ) -> None:
        self.trained, self.wire = trained, wire
        self.seen_bytes = self.dense = self.sent = 0
        self.types: set[str] = set()
        self.storages: set[int] = set()

        @no_type_check  # DDP refuses annotations that are not its own
        def counting(link, bucket):
            if bucket.index() == 0:  # DDP replaces its buckets after the first step
                link.storages.clear()
            link.storages.add(bucket.buffer().untyped_storage()._cdata)
            link.seen_bytes += bucket.buffer().numel() * 4
            return hook(bucket)

        trained.model.register_comm_hook(self, counting)

    def after_step(self) -> None:
        self.sent, self.types, self.dense = self.wire.bytes, self.wire.types, self.seen_bytes
        self.wire.bytes, self.wire.types, self.seen_bytes = 0, set(), 0


@dataclass(frozen=True, kw_only=True)
class OnTheWire(Strategy):
    """Base of strategies that send less than the gradients."""

    slot: ClassVar[Slot] = Slot.COMPRESS
    alters: ClassVar[tuple[str, ...]] = ("gradients",)

    def traits(self) -> frozenset[str]:
        return frozenset({"edits_gradients"})

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        """Return bytes and types that this rank sent in the last step, relative to float32
        gradients."""
        link: Any = trained.attached.get(self.name)
        demand(isinstance(link, Compression), "no hook is on DDP's all-reduce")
        total = 4 * sum(p.numel() for p in trained.module.parameters() if p.requires_grad)
        text = f"the hook received {link.dense} of {total} bytes of gradients in the last step"
        demand(link.dense == total > 0, text)
        return {
            "wire_bytes": link.sent,
            "wire_dtype": "+".join(sorted(link.types)),
            "dense_bytes": link.dense,
        }
