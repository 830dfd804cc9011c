"""compress: gradients in 16 bits or by PowerSGD under DDP, by torch's own communication hooks.

The bytes that a hook sends are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, no_type_check

from strategies.base import Attachment, Slot, demand
from strategies.engine import TrainingRun
from strategies.strategy import Strategy

# ---- counted bytes ----

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
        self, run: TrainingRun, hook: Callable[[Any], Any], wire: CountedCollectives
    ) -> None:
        self.run, self.wire = run, wire
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

        run.model.register_comm_hook(self, counting)

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

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        """Return bytes and types that this rank sent in the last step, relative to float32
        gradients."""
        link: Any = run.attached.get(self.name)
        demand(isinstance(link, Compression), "no hook is on DDP's all-reduce")
        total = 4 * sum(p.numel() for p in run.module.parameters() if p.requires_grad)
        text = f"the hook received {link.dense} of {total} bytes of gradients in the last step"
        demand(link.dense == total > 0, text)
        return {
            "wire_bytes": link.sent,
            "wire_dtype": "+".join(sorted(link.types)),
            "dense_bytes": link.dense,
        }


# ---- torch's hooks ----

# DDP rebuilds its buckets after the first step; earlier errors belong to other buckets.
DENSE_STEPS = 2
TYPES = {"fp16": "float16", "bf16": "bfloat16"}
"""``kind`` of 16 bits -> torch's type."""


LEAST_SAVING = 2
"""A gradient is sent whole unless its two matrices are smaller by this factor."""


def low_rank_bytes(parameters: Iterable[Any], rank: int) -> int:
    """Return the bytes that a step sends of these parameters' gradients.

    A gradient, as a matrix with its first dimension as rows, is sent as two matrices of ``rank``
    columns, or whole if that saves little.
    """
    total = 0
    for p in parameters:
        rows, columns = p.shape[0], p.numel() // p.shape[0]
        thin = (rows + columns) * min(rows, columns, rank)
        total += p.element_size() * (thin if thin * LEAST_SAVING < p.numel() else p.numel())
    return total


class PowerSgd(Compression):
    """Hook that all-reduces each bucket as two low-rank matrices; the error is added to the next
    step."""

    def __init__(self, run: TrainingRun, rank: int) -> None:
        _, hooks, counted = counted_hooks()
        self.power = hooks.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=DENSE_STEPS,
            min_compression_rate=LEAST_SAVING,
        )

        def average(bucket: Any) -> Any:
            future = hooks.powerSGD_hook(self.power, bucket)
            # gloo starts the hook's three collectives from threads of its own, in another order on
            # each rank, unless buckets run in turn.
            if run.launch.device == "cpu":
                future.wait()
            return future

        super().__init__(run, average, counted)

    def _buffers(self) -> list[dict[int, Any]]:
        return [self.power.error_dict, self.power.q_memory_dict, self.power.p_memory_dict]

    def tensors(self) -> Iterable[Any]:
        return [tensor for buffers in self._buffers() for tensor in buffers.values()]

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self._buffers()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them; the first steps are uncompressed again, until DDP has built its buckets."""
        device = next(self.run.module.parameters()).device
        for mine, saved in zip(self._buffers(), state["kept"], strict=True):
            mine.update({bucket: tensor.to(device) for bucket, tensor in saved.items()})


def cast(run: TrainingRun, kind: str) -> Compression:
    """Return a hook that all-reduces buckets in 16 bits."""
    hooks, _, counted = counted_hooks()
    hook = getattr(hooks, f"{kind}_compress_hook")
    return Compression(run, lambda bucket: hook(None, bucket), counted)


@dataclass(frozen=True, kw_only=True)
class Compress(OnTheWire):
    """Averages gradients in 16 bits or as low-rank products.

    ``kind=powersgd`` sends a product of two matrices of ``rank``.
    """

    name: ClassVar[str] = "compress"
    source: ClassVar[str] = "Vogels et al. 2019, PowerSGD (arXiv:1905.13727); torch DDP comm hooks"
    values: ClassVar[dict[str, Any]] = {"kind": (*TYPES, "powersgd")}
    least: ClassVar[dict[str, int]] = {"rank": 1}

    kind: str = "bf16"
    rank: int = 4

    def attach(self, run: TrainingRun) -> Compression:
        if self.kind == "powersgd":
            return PowerSgd(run, self.rank)
        return cast(run, self.kind)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        facts = super().evidence(run)
        sent, kind, dense = facts["wire_bytes"], facts["wire_dtype"], facts["dense_bytes"]
        if self.kind != "powersgd":
            demand(2 * sent == dense, f"{sent} bytes were sent, expected a half")
            wanted = TYPES[self.kind]
            demand(kind == wanted, f"gradients were sent as {kind}, expected {wanted}")
            return facts
        power: Any = getattr(run.attached[self.name], "power", None)
        demand(power is not None, "no low-rank hook is on DDP's all-reduce")
        taken = run.optimizer_steps - run.resumed_steps
        demand(taken > DENSE_STEPS, f"the first {DENSE_STEPS} steps are dense; take more --steps")
        free = [p for p in run.module.parameters() if p.requires_grad]
        least = low_rank_bytes(free, self.rank)
        demand(sent == least, f"{sent} of {dense} bytes were sent, expected {least}")
        has_error = any(bool(error.any()) for error in power.error_dict.values())
        demand(has_error, "no rounding error is kept for the next step (error feedback)")
        return facts
