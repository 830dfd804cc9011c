"""Every tensor storage that the training makes and frees, on tensors without storage.

Like ``harness.anatomy.Trace``, which measures, but from the first line of the set-up on, for the
device and the host at once, with the source line of each allocation and finer categories.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness import anatomy
from harness.predict.peak import Block, Record
from harness.resolve import project_root
from strategies.base import Trained

__all__ = ["Tracer"]

aten = torch.ops.aten
ROOT = str(project_root()) + "/"
LIBRARIES = ("/deepspeed/", "/torchao/", "/bitsandbytes/", "/peft/", "/torch/optim/")
RECOMPUTING = "/torch/utils/checkpoint.py"
OURSELVES = "/harness/predict/"
MARKS = "/harness/anatomy.py"
DEPTH = 40
# What a value that is not there is answered with: no overflow, a norm of one. torch's own scaler
# keeps its overflow in float32, where one would skip the step: it is not asked (storageless).
ANSWERS = {torch.bool: False, torch.float32: 1.0, torch.float64: 1.0, torch.bfloat16: 1.0}

Temporary = Callable[[Any, Any, Any], int]
"""(op, arguments, output) -> bytes that the op's kernel holds only while it runs."""


class Tracer(TorchDispatchMode):
    """Follows storages on the devices in ``pools`` (device type -> pool name).

    Args:
        temporary: scratch that kernels of the predicted device take inside.
        witness: told of every op with its arguments and output (the roofline counts work so).
    """

    def __init__(
        self,
        pools: dict[str, str],
        temporary: Temporary = lambda func, args, out: 0,
        witness: Callable[[str, Any, Any, Any], None] = lambda phase, func, args, out: None,
    ) -> None:
        super().__init__()
        self.pools, self.temporary, self.witness = pools, temporary, witness
        self.record = Record(blocks=[], events=[], marks=[])
        self.phase, self.sharded = "start", False
        self._live: dict[int, tuple[int, Any]] = {}
        self._left_out: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)
        if func is aten._local_scalar_dense.default:
            return ANSWERS.get(args[0].dtype, 0)
        out = func(*args, **(kwargs or {}))
        if _bookkeeping(func, kwargs or {}):
            self.leave_out([out])
            return out
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf, func, args)
        scratch = self.temporary(func, args, out)
        if scratch:
            self.hold("device", scratch, str(func), "temporaries")()
        self.witness(self.phase, func, args, out)
        return out

    # ---- what happens ----

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase
        self.record.marks.append((len(self.record.events), phase))

    def hold(self, pool: str, size: int, op: str, category: str) -> Callable[[], None]:
        """Bytes that no op of this process makes (a C++ bucket, a workspace); call to free."""
        index = self._add(Block(size, pool, self.phase, op, self._site()[0], category))

        def free() -> None:
            self._free(None, index)

        return free

    def see(self, tensor: torch.Tensor, func: Any, args: Any = ()) -> None:
        """Note a tensor's storage if it is new and lies on a device that is followed."""
        pool = self.pools.get(tensor.device.type)
        storage = self._storage(tensor) if pool else None
        if storage is None or storage._cdata in self._live or storage._cdata in self._left_out:
            return
        size = storage.nbytes()
        if not size:
            return
        if self.phase == "load" and tensor.device.type == "meta":
            # The harness makes the model's modules on meta before it gives them storage.
            self.leave_out([tensor])
            return
        site, category = self._site()
        category = category or self._cast_of_weight(func, args)
        index = self._add(Block(size, pool, self.phase, str(func), site, category))
        key = storage._cdata
        self._live[key] = (index, weakref.ref(storage, lambda _: self._free(key, index)))

    def leave_out(self, tensors: Iterable[Any]) -> None:
        """Count these storages no longer, or never."""
        for tensor in tensors:
            if torch.is_tensor(tensor):
                storage = self._storage(tensor)
                forget = functools.partial(self._forget, storage._cdata)
                self._left_out[storage._cdata] = weakref.ref(storage, forget)
                if storage._cdata in self._live:
                    self._free(None, self._live.pop(storage._cdata)[0])

    def _forget(self, key: int, _: Any) -> None:
        """The address of a storage that died may be another's."""
        self._left_out.pop(key, None)

    def tag(self, category: str, tensors: Iterable[Any]) -> None:
        """Say what tensors that live now are; what already has a category keeps it."""
        for tensor in tensors:
            storage = self._storage(tensor) if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata in self._live:
                block = self.record.blocks[self._live[storage._cdata][0]]
                block.category = block.category or category

    def tag_known(self, trained: Trained) -> None:
        """Name what lives between two steps; what the anatomy of a measured run names alike."""
        self.sharded = trained.engine is not None
        self.tag("parameters", anatomy.parameter_tensors(trained))
        self.tag("optimizer_state", anatomy.optimizer_tensors(trained))
        self.tag("ema", [t for a in trained.attached.values() for t in a.tensors()])
        self.tag("buckets", bucket_tensors(trained))
        self.tag("gradients", anatomy.gradient_buffers(trained))
        self.tag_gradients(trained)

    def tag_gradients(self, trained: Trained) -> None:
        """What the parameters hold as ``.grad`` is gradients."""
        self.tag("gradients", [p.grad for p in trained.module.parameters() if p.grad is not None])

    # ---- keeping the books ----

    def _add(self, block: Block) -> int:
        self.record.blocks.append(block)
        index = len(self.record.blocks) - 1
        self.record.events.append((+1, index))
        return index

    def _free(self, key: int | None, index: int) -> None:
        if key is not None and self._live.get(key, (None,))[0] != index:
            return
        self._live.pop(key, None)
        self.record.blocks[index].freed_in = self.phase
        self.record.events.append((-1, index))

    @staticmethod
    def _storage(tensor: torch.Tensor) -> Any | None:
        try:
            return tensor.untyped_storage()
        except NotImplementedError:  # a subclass without storage of its own
            return None

    def _cast_of_weight(self, func: Any, args: Any) -> str | None:
        """Autocast's low-precision copy of a weight, kept until backward has used it."""
        if func is not aten._to_copy.default or self.phase != "forward" or self.sharded:
            return None
        source = args[0]
        is_weight = isinstance(source, torch.Tensor) and source.is_leaf and source.requires_grad
        return "autocast" if is_weight else None

    def _site(self) -> tuple[str, str | None]:
        """The innermost line of ours or of a training library, and what its file makes of it."""
        frame, site, category = sys._getframe(2), "", None
        for _ in range(DEPTH):
            if frame is None:
                break
            file = frame.f_code.co_filename
            if file.endswith(RECOMPUTING) and self.phase == "backward":
                category = category or "recomputed"
            if not site and OURSELVES not in file and not file.endswith(MARKS):
                site = _place(file, frame.f_lineno)
            if self.sharded and category is None:
                category = self._by_maker(file)
            frame = frame.f_back
        return site, category

    def _by_maker(self, file: str) -> str | None:
        """DeepSpeed swaps ``.data`` under the parameters: the file that makes a tensor says what
        it is."""
        name = file.rpartition("/")[2]
        if name in anatomy.GATHERING:
            return "gathered"
        if name in anatomy.REDUCING and self.phase in ("forward", "backward"):
            return "buckets"
        return None


def _bookkeeping(func: Any, kwargs: dict[str, Any]) -> bool:
    """DeepSpeed remembers shapes as tensors on ``meta``: in a real run they take no memory.

    A GPU's tensors are on ``meta`` here as well, but none of them is asked for by that name.
    """
    if func is not aten.zeros_like.default or str(kwargs.get("device", "")) != "meta":
        return False
    frame = sys._getframe(2)
    while frame is not None and any(w in frame.f_code.co_filename for w in ("/torch/", OURSELVES)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith("zero/stage_1_and_2.py")


def _place(file: str, line: int) -> str:
    """``file:line`` as a reader finds it; empty for files that explain nothing."""
    # The environment that run.sh makes lies below the root too, and is not ours.
    if file.startswith(ROOT) and "/site-packages/" not in file:
        return f"{file[len(ROOT) :]}:{line}"
    for library in LIBRARIES:
        if library in file:
            return f"{library.strip('/')}/{file.rpartition(library)[2]}:{line}"
    return ""


def bucket_tensors(trained: Trained) -> list[torch.Tensor]:
    """DeepSpeed's communication buckets."""
    buckets = getattr(getattr(trained.engine, "optimizer", None), "ipg_buckets", {})
    leaves = [leaf for bucket in buckets.values() for leaf in tree_leaves(vars(bucket))]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [t for t in tensors if not isinstance(t, torch.nn.Parameter)]
