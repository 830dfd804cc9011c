"""DDP communication hooks with counted bytes: base classes and evidence of compressed gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, no_type_check

from strategies.base import Attachment, Parity, Slot, demand
from strategies.engine import TrainingRun
from strategies.strategy import Strategy

# ---- counted collectives ----


class CountedCollectives:
    """Replacement of ``torch.distributed`` in torch's hook modules that counts this rank's inputs.

    The counts are of what is really sent, whatever the hook reports.
    """

    def __init__(self, distributed: ModuleType) -> None:
        self.distributed, self.bytes = distributed, 0
        self.types: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.distributed, name)

    def all_reduce(self, tensor: Any, *given: Any, **more: Any) -> Any:
        """Call the collective, and count the bytes of its input."""
        self._count(tensor)
        return self.distributed.all_reduce(tensor, *given, **more)

    def all_gather(self, outputs: Any, tensor: Any, *given: Any, **more: Any) -> Any:
        """Call the collective, and count the bytes of its input."""
        self._count(tensor)
        return self.distributed.all_gather(outputs, tensor, *given, **more)

    def _count(self, tensor: Any) -> None:
        self.bytes += tensor.numel() * tensor.element_size()
        self.types.add(str(tensor.dtype).removeprefix("torch."))

    def forget(self) -> None:
        """Reset the counts."""
        self.bytes, self.types = 0, set()


def counted_hooks() -> tuple[Any, Any, CountedCollectives]:
    """Return torch's hook modules, with their collectives counted from now on."""
    import torch.distributed
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    counted = CountedCollectives(torch.distributed)
    default_hooks.dist = powerSGD_hook.dist = counted
    return default_hooks, powerSGD_hook, counted


@dataclass(frozen=True, kw_only=True)
class OnTheWire(Strategy):
    """Base of strategies that send less than the gradients."""

    slot: ClassVar[Slot] = Slot.COMPRESS
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("gradients",)

    def traits(self) -> frozenset[str]:
        return frozenset({"edits_gradients"})


class Compression(Attachment):
    """Hook that replaces DDP's all-reduce, with the bytes of the last step, sent and uncompressed.

    ``hook`` takes a bucket and returns a future of its averaged buffer. ``storages`` are those of
    DDP's buckets in the last backward.
    """

    def __init__(
        self, trained: TrainingRun, hook: Callable[[Any], Any], wire: CountedCollectives
    ) -> None:
        self.trained, self.wire, self.buckets = trained, wire, 0
        self.dense_bytes = self.sent = self.dense = 0
        self.types: set[str] = set()
        self.storages: set[int] = set()

        @no_type_check  # DDP refuses annotations that are not its own
        def counting(link, bucket):
            link._look(bucket)
            return hook(bucket)

        trained.model.register_comm_hook(self, counting)

    def _look(self, bucket: Any) -> None:
        if bucket.index() == 0:  # DDP replaces its buckets after the first step
            self.storages.clear()
        self.storages.add(bucket.buffer().untyped_storage()._cdata)
        self.buckets += 1
        self.dense_bytes += bucket.buffer().numel() * 4

    def after_step(self) -> None:
        """Store the bytes of the step that ended, and reset the counts."""
        self.sent, self.types = self.wire.bytes, self.wire.types
        self.wire.forget()
        self.dense, self.dense_bytes = self.dense_bytes, 0


def facts(trained: TrainingRun, name: str) -> dict[str, Any]:
    """Return bytes and types that this rank sent in the last step, relative to float32
    gradients."""
    link: Any = trained.attached.get(name)
    demand(isinstance(link, Compression), "no hook is on DDP's all-reduce")
    demand(link.buckets > 0 and link.dense > 0, "the hook received no gradients")
    total = 4 * sum(p.numel() for p in trained.module.parameters() if p.requires_grad)
    text = f"the hook received {link.dense} of {total} bytes of gradients in the last step"
    demand(link.dense == total, text)
    return {
        "wire_bytes": link.sent,
        "wire_dtype": "+".join(sorted(link.types)),
        "dense_bytes": link.dense,
    }
