"""Where the memory of one step goes: phase boundaries, and what was alive at the peak.

Both look at extra, untimed steps of the same training. ``phase_marks`` tells a callback when
forward, backward and optimizer begin, whichever engine runs them. ``Trace`` follows every tensor
storage that is made and freed, and names what was alive at the highest instant.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.portrait import CATEGORIES
from harness.result import Categories
from strategies.base import Trained
from strategies.support import states

__all__ = ["Trace", "phase_marks", "trace_step"]

# Which part of DeepSpeed made a tensor says what it is: it swaps ``.data`` under the parameters.
GATHERING = ("partition_parameters.py", "partitioned_param_coordinator.py", "parameter_offload.py")
REDUCING = ("stage_1_and_2.py", "stage3.py", "contiguous_memory_allocator.py")


@contextlib.contextmanager
def phase_marks(trained: Trained, enter: Callable[[str], None]) -> Iterator[None]:
    """Call ``enter`` with forward, backward and optimizer as each begins, until the end.

    Under DeepSpeed accelerate's ``backward`` steps the optimizer as well, so the boundary is the
    engine's own ``step``; elsewhere the optimizer's part begins when the last backward returns
    (the gradient norm belongs to it).
    """
    accelerator, engine = trained.accelerator, trained.engine
    backward = accelerator.backward

    def marked_backward(*given: Any, **more: Any) -> None:
        enter("backward")
        backward(*given, **more)
        if engine is None:
            enter("optimizer" if accelerator.sync_gradients else "forward")
        elif not accelerator.sync_gradients:
            enter("forward")

    accelerator.backward = marked_backward
    if engine is not None:
        step = engine.step

        def marked_step(*given: Any, **more: Any) -> None:
            enter("optimizer")
            step(*given, **more)

        engine.step = marked_step
    enter("forward")
    try:
        yield
    finally:
        accelerator.backward = backward
        if engine is not None:
            del engine.step


@dataclass(slots=True)
class Block:
    """One tensor storage. ``category`` is None until something says what it is."""

    size: int
    phase: str
    made_by: str
    category: str | None = None
    freed_in: str | None = None


class Trace(TorchDispatchMode):
    """Every storage on ``device_type`` made or freed while active, in order.

    Source of the idea: torch.distributed._tools.MemTracker; this one keeps no reference to a
    tensor, so that it does not lengthen the life of what it counts.
    """

    def __init__(self, trained: Trained, device_type: str, left_out: Iterable[Any] = ()) -> None:
        super().__init__()
        self.left_out = {t.untyped_storage()._cdata for t in left_out if torch.is_tensor(t)}
        self.trained, self.device_type, self.phase = trained, device_type, "before"
        self.sharded = trained.engine is not None
        self.ops: set[str] = set()
        self.hidden = False
        self.blocks: list[Block] = []
        self.events: list[tuple[int, int]] = []
        self._live: dict[int, tuple[int, Any]] = {}
        self._register_known()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if states.wrapped(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self.ops.add(str(func))
        # Views of DDP's buckets come out of ops that were given them: counted already.
        given = storages((args, kwargs)) if self.hidden else ()
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not (given and storages(leaf) & given):
                self._see(leaf, str(func))
        return out

    def mark_gradient(self, gradient: torch.Tensor) -> None:
        """A parameter's gradient has arrived: whatever holds it is gradient memory."""
        self._see(gradient, "gradient", "gradients")

    def enter(self, phase: str) -> None:
        """Begin a phase; at the optimizer, what the parameters hold as .grad is gradients."""
        self.phase = phase
        if phase == "optimizer":
            for p in self.trained.module.parameters():
                if p.grad is not None:
                    self._see(p.grad, "gradient", "gradients")

    def _see(self, tensor: torch.Tensor, made_by: str, category: str | None = None) -> None:
        if tensor.device.type == self.device_type:
            for storage in _storages(tensor):
                self._note(storage, made_by, category)

    def _note(self, storage: torch.UntypedStorage, made_by: str, category: str | None) -> None:
        key = storage._cdata
        if key in self._live:
            if category:
                self.blocks[self._live[key][0]].category = category
            return
        size = storage.nbytes()
        if not size or key in self.left_out:
            return
        index = len(self.blocks)
        category = category or (self._by_maker() if self.sharded else None)
        self.blocks.append(Block(size, self.phase, made_by, category))
        self.events.append((+1, index))
        self._live[key] = (index, weakref.ref(storage, lambda _: self._free(key, index)))

    def _free(self, key: int, index: int) -> None:
        self._live.pop(key, None)
        self.blocks[index].freed_in = self.phase
        self.events.append((-1, index))

    def _by_maker(self) -> str | None:
        """The category of a tensor that DeepSpeed makes for itself, by the file that makes it."""
        frame = sys._getframe(4)
        for _ in range(12):
            if frame is None:
                break
            name = frame.f_code.co_filename.rpartition("/")[2]
            if name in GATHERING:
                return "parameters"
            if name in REDUCING:
                return "gradients" if self.phase in ("forward", "backward") else None
            frame = frame.f_back
        return None

    def _register_known(self) -> None:
        """What lives before the step: parameters, optimizer state, averages; the rest unnamed."""
        self._register_buckets()
        known = {
            "parameters": parameter_tensors(self.trained),
            "optimizer_state": optimizer_tensors(self.trained),
            "ema": [t for a in self.trained.attached.values() for t in a.tensors()],
            "gradients": [p.grad for p in self.trained.module.parameters() if p.grad is not None]
            + gradient_buffers(self.trained),
        }
        for category, tensors in known.items():
            for tensor in tensors:
                self._see(tensor, "before", category)
        gc.collect()  # what only cycles keep alive is not part of the step
        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and not thing.is_sparse:
                self._see(thing, "before")

    def _register_buckets(self) -> None:
        """DDP's gradient buckets live in C++, where no tensor of theirs is to be seen.

        Where Python did see them (a communication hook gets them), they are not counted again.
        """
        if self.trained.accelerator.device.type != self.device_type:
            return
        size, seen = ddp_buckets(self.trained.model)
        self.left_out |= seen
        self.hidden = size > 0
        if self.hidden:
            self.events.append((+1, len(self.blocks)))
            self.blocks.append(Block(size, self.phase, "DDP's buckets", "workspace"))

    def categories(self) -> Categories:
        """What was alive at the highest instant, in bytes."""
        kinds = [self._category(block) for block in self.blocks]
        _, peak_at = self._highest(set(kinds), kinds)
        sums = dict.fromkeys(CATEGORIES, 0)
        for sign, index in self.events[: peak_at + 1]:
            sums[kinds[index]] += sign * self.blocks[index].size
        top = self.blocks[self.events[peak_at][1]]
        beyond, _ = self._highest({"activations", "workspace"}, kinds)
        return Categories(**sums, phase=top.phase, where=top.made_by, beyond_state=beyond)

    def _highest(self, wanted: set[str], kinds: list[str]) -> tuple[int, int]:
        """The most bytes that blocks of the ``wanted`` kinds held at once, and at which event."""
        total, best, best_at = 0, -1, 0
        for at, (sign, index) in enumerate(self.events):
            if kinds[index] in wanted:
                total += sign * self.blocks[index].size
            if total > best:
                best, best_at = total, at
        return best, best_at

    @staticmethod
    def _category(block: Block) -> str:
        if block.category:
            return block.category
        kept = block.phase == "forward" and block.freed_in in ("backward", "optimizer", None)
        return "activations" if kept else "workspace"


def parameter_tensors(trained: Trained) -> list[torch.Tensor]:
    """Parameters as this rank stores them, with the engine's flat low-precision copies."""
    found = [t for p in trained.module.parameters() for t in states.stored(p.data)]
    found += [p.ds_tensor.data for p in trained.module.parameters() if hasattr(p, "ds_tensor")]
    if trained.engine is not None:
        optimizer = trained.engine.optimizer
        found += [t for t in getattr(optimizer, "bit16_groups_flat", []) if t is not None]
        flats = getattr(optimizer, "fp16_partitioned_groups_flat", [])
        found += [t for t in flats if t is not None]
    return found + list(trained.module.buffers())


def optimizer_tensors(trained: Trained) -> list[torch.Tensor]:
    """Moments, and the float32 master weights that DeepSpeed keeps (optimizer state in ZeRO's
    terms). A master that shares its storage with a parameter was counted there already."""
    found = states.tensors(trained.inner_optimizer)
    if trained.engine is not None:
        found += trained.optimized()
    known = {t.untyped_storage()._cdata for t in parameter_tensors(trained)}
    return [t for t in found if t.untyped_storage()._cdata not in known]


def gradient_buffers(trained: Trained) -> list[torch.Tensor]:
    """What holds gradients between steps: DeepSpeed's buckets, partitions and host copies."""
    if trained.engine is None:
        return []
    optimizer = trained.engine.optimizer
    found = [b for bucket in optimizer.ipg_buckets.values() for b in _tensors(vars(bucket))]
    for name in (
        "averaged_gradients",
        "grad_partitions_flat_buffer",
        "temp_grad_buffer_for_cpu_offload",
    ):
        found += _tensors(getattr(optimizer, name, None))
    return found + [m.grad for m in trained.optimized() if m.grad is not None]


def ddp_buckets(model: torch.nn.Module) -> tuple[int, set[int]]:
    """Bytes of DDP's gradient buckets by its own books, and the storages that Python has seen."""
    if not isinstance(model, DistributedDataParallel):
        return 0, set()
    books = model._get_ddp_logging_data()
    sizes = books.get("rebuilt_bucket_sizes") or books["bucket_sizes"]
    seen = {s for _, state in model._comm_hooks for s in getattr(state, "storages", ())}
    return sum(int(size) for size in sizes.split(",")), seen


def storages(values: Any) -> set[int]:
    """What identifies the storages of the plain tensors in a structure of arguments."""
    return {storage._cdata for t in _tensors(values) for storage in _storages(t)}


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Where a tensor's bytes are, also those of a sparse one and of one that wraps others."""
    for plain in states.stored(tensor):
        with contextlib.suppress(NotImplementedError):  # a layout without storage
            yield plain.untyped_storage()


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if not isinstance(leaf, torch.nn.Parameter)]


def trace_step(
    trained: Trained, device_type: str, step: Callable[[], None], left_out: Iterable[Any] = ()
) -> Categories:
    """Run ``step`` once under a trace and say what was alive at its peak on ``device_type``.

    ``left_out``: tensors that the meter's baseline holds already (data resident on a CPU).
    """
    trace = Trace(trained, device_type, left_out)
    handles = [
        p.register_hook(trace.mark_gradient) for p in trained.module.parameters() if p.requires_grad
    ]
    try:
        with phase_marks(trained, trace.enter), trace:
            step()
    finally:
        for handle in handles:
            handle.remove()
    trained.ops |= trace.ops
    return trace.categories()
