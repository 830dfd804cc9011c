"""Gradients on their way between replicas: a hook on DDP's all-reduce, its bytes counted."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from strategies.base import Watcher, demand
from strategies.engine import RunContext, TrainingRun

# ---- counted ----
# What a communication hook hands to torch's collectives, counted: bytes and types.


class CountedCollectives:
    """Stands in a module of torch's hooks for ``torch.distributed``, and counts what this rank
    hands to its collectives: what is really sent, whatever the hook says of itself."""

    def __init__(self, distributed: ModuleType) -> None:
        self.distributed, self.bytes = distributed, 0
        self.types: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.distributed, name)

    def all_reduce(self, tensor: Any, *given: Any, **more: Any) -> Any:
        """The collective, with the bytes of its input counted."""
        self._count(tensor)
        return self.distributed.all_reduce(tensor, *given, **more)

    def all_gather(self, outputs: Any, tensor: Any, *given: Any, **more: Any) -> Any:
        """The collective, with the bytes of its input counted."""
        self._count(tensor)
        return self.distributed.all_gather(outputs, tensor, *given, **more)

    def _count(self, tensor: Any) -> None:
        self.bytes += tensor.numel() * tensor.element_size()
        self.types.add(str(tensor.dtype).removeprefix("torch."))

    def forget(self) -> None:
        """Count from zero."""
        self.bytes, self.types = 0, set()


def counted_hooks() -> tuple[Any, Any, CountedCollectives]:
    """torch's hook modules, their collectives counted from now on."""
    import torch.distributed
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    counted = CountedCollectives(torch.distributed)
    default_hooks.dist = powerSGD_hook.dist = counted
    return default_hooks, powerSGD_hook, counted


class Compression(Watcher):
    """A hook in place of DDP's all-reduce; bytes of the last step, and of it uncompressed.

    ``hook`` takes a bucket and gives a future of its averaged buffer. ``storages`` are those of
    DDP's buckets as the last backward showed them.
    """

    def __init__(
        self, trained: TrainingRun, hook: Callable[[Any], Any], wire: CountedCollectives
    ) -> None:
        self.trained, self.wire, self.buckets = trained, wire, 0
        self.dense_bytes = self.sent = self.dense = 0
        self.types: set[str] = set()
        self.storages: set[int] = set()

        def counting(link, bucket):  # DDP reads annotations, and knows none but its own
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
        """Keep the bytes of the step that ended, and count the next one's from zero."""
        self.sent, self.types = self.wire.bytes, self.wire.types
        self.wire.forget()
        self.dense, self.dense_bytes = self.dense_bytes, 0


class WithFeedback(Compression):
    """A hook that keeps what it did not send and adds it to the next step's gradient, a parameter
    each: DDP's buckets change after the first step, parameters do not.

    ``left`` is keyed by a parameter's place in the model, as ids mean nothing to a checkpoint.
    """

    def __init__(
        self, trained: TrainingRun, hook: Callable[[Any], Any], wire: CountedCollectives
    ) -> None:
        super().__init__(trained, hook, wire)
        self.place = {id(p): i for i, p in enumerate(trained.module.parameters())}
        self.left: dict[int, Any] = {}

    def tensors(self) -> list[Any]:
        """What was kept back: as large as the gradients."""
        return list(self.left.values())

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps back."""
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it up again."""
        device = next(self.trained.module.parameters()).device
        self.left = {place: tensor.to(device) for place, tensor in state["left"].items()}


def refusal(launch: RunContext) -> str | None:
    """Why DDP's all-reduce cannot be compressed under ``launch``."""
    if launch.simulated:
        return "a simulated world sends nothing that could be compressed; leave --world out"
    if "replicas" in launch.traits:
        return None
    if "one_process" in launch.traits:
        return "one process sends no gradients; use ddp"
    return "it hooks into DDP's all-reduce, and this engine reduces by itself; use ddp"


def facts(trained: TrainingRun, name: str) -> dict[str, Any]:
    """Bytes and types that this rank handed over in the last step, against the same gradients in
    float32."""
    link = trained.attached.get(name)
    demand(isinstance(link, Compression), "no hook is on DDP's all-reduce")
    demand(link.buckets > 0 and link.dense > 0, "the hook saw no gradients")
    total = 4 * sum(p.numel() for p in trained.module.parameters() if p.requires_grad)
    demand(link.dense == total, f"the hook saw {link.dense} bytes of {total} in the last step")
    return {
        "wire_bytes": link.sent,
        "wire_dtype": "+".join(sorted(link.types)),
        "dense_bytes": link.dense,
        "ratio": round(link.sent / link.dense, 4),
    }
