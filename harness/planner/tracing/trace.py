"""Tracer of a prediction: it records storages without bytes, and counts the work of each op.
It extends the tracer of a measured step (``harness.memory.tracer``). It returns values that
libraries read from tensors without storage, adds the scratch of the predicted device's kernels, and
finds source lines."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter as Tally
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from harness import ROOT
from harness.memory.op_facts import is_free
from harness.memory.record import Storage
from harness.memory.tracer import DEVICE, HOST, Tracer, storage_of
from harness.planner.tracing import side_streams
from harness.planner.tracing.op_cache import OpCache, device_of, makes_view
from harness.prediction import Work
from harness.system.cards import FLOAT8
from strategies import initial
from strategies.base import pinned_block
from strategies.evidence.flops import formulas
from strategies.evidence.readings import stored
from strategies.evidence.watching import FUNCTIONAL, group_of
from strategies.inventory import AllocationScope

aten = torch.ops.aten
OWN = f"{ROOT}/"
PACKAGES = "/site-packages/"
RECOMPUTING = "/torch/utils/checkpoint.py"
RUNNING_BACKWARD = "/torch/autograd/graph.py"
"""Frames between this file and ``RECOMPUTING`` are a reentrant checkpoint's own backward, which
recomputes nothing."""
OURSELVES = ("/harness/planner/", "/harness/memory/")
ADAPTERS = "/harness/planner/adapters/"
"""The adapters allocate in place of the engines, so a source line may be theirs."""
DEPTH = 40
# Values read from tensors without storage: no overflow, a norm of one. Torch's own scaler stores
# its overflow in float32, where 1.0 would skip the step, so ``shortcuts.step_always`` replaces it.
ANSWERS = {torch.bool: False, torch.float32: 1.0, torch.float64: 1.0, torch.bfloat16: 1.0}

ASIDE = AllocationScope(None, "", "", beside=True)
"""Scope of copies on a side stream."""

Temporary = Callable[[Any, Any, Any], int]
"""(op, arguments, output) -> bytes that the op's kernel holds only while it runs."""


class StoragelessTracer(Tracer):
    """Tracer of storages that have a size and no bytes.

    Args:
        pools: device type -> pool name.
        temporary: returns the scratch bytes of an op's kernel on the predicted device.
        witness: called for each op with its phase, arguments, output, and whether it runs beside
            the computation; the roofline counts its work.
        moved: called for work without an op, as ``Counter.add``.
        shapes_in: endings of the files that keep shapes on ``meta`` (``TraceAdapter.shapes_in``).
    """

    def __init__(
        self,
        pools: dict[str, str],
        temporary: Temporary = lambda func, args, out: 0,
        witness: Callable[..., None] = lambda phase, func, args, out, beside: None,
        moved: Callable[..., None] = lambda *told: None,
        shapes_in: tuple[str, ...] = (),
    ) -> None:
        super().__init__(pools)
        self.temporary, self.witness, self.moved = temporary, witness, moved
        self.shapes_in = shapes_in
        self.op_cache: OpCache | None = None
        """Cache of operations; None before a fake tensor mode exists."""
        self.denoising: int | None = None
        """Peak bytes of a validation's forward pass, if one was requested."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and True makes torch wrap each call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return device_of(args[0])
        if func is aten._local_scalar_dense.default:
            return ANSWERS.get(args[0].dtype, 0)
        if func is aten.nonzero.default:
            return _all_of(args[0])
        # Not super().__torch_dispatch__, which torch has wrapped to exclude it from compilation.
        return self.followed(func, types, args, kwargs or {})

    def drop_from(self, first: int) -> None:
        """Remove the events from ``first`` on, and stop following the storages allocated in
        them."""
        events = self.record.events
        made = {index for sign, index in events[first:] if sign > 0}
        del events[first:]
        for key in [key for key, (index, _) in self._live.items() if index in made]:
            del self._live[key]

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an op, from the cache if there is one."""
        if self.op_cache is None:
            return super().run(func, args, kwargs)
        return self.op_cache(func, args, kwargs)

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        return device_of(tensor)

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record an op's new storages, its kernel's scratch and its work."""
        if self.places is None and makes_view(func) and type(out) is FakeTensor:
            storage = storage_of(out)
            if storage is not None and self._known(storage):  # followed, or left out
                self.ops.add(str(func))  # no memory, no work
                return
        if self._keeps_shapes(func, kwargs):
            self.leave_out([out])
            return
        super().ran(func, args, kwargs, out)
        if kwargs.get("pin_memory"):
            self.pin(out)
        scratch = self.temporary(func, args, out)
        if scratch:
            self.hold("device", scratch, str(func), "temporaries")()
        beside = any(maker.beside for maker in self._makers)
        self.witness(self.phase, func, args, out, beside)

    def see(self, tensor: torch.Tensor, func: Any, args: Any = ()) -> None:
        """Follow the tensor as ``Tracer.see`` does, except on ``meta`` before a model has its
        weights.
        A model is first made on ``meta``; those tensors are not the predicted device's."""
        if device_of(tensor).type == "meta" and initial.is_valueless():
            self.leave_out([tensor])
        else:
            super().see(tensor, func, args)

    def _keeps_shapes(self, func: Any, kwargs: dict[str, Any]) -> bool:
        """Return True if a library makes a tensor on ``meta`` only to keep its shape.
        Such a tensor takes no memory in a real run. The GPU's tensors are on ``meta`` here too, so
        the calling file distinguishes the two."""
        is_shape = func is aten.zeros_like.default and str(kwargs.get("device", "")) == "meta"
        frame = sys._getframe(2) if is_shape and self.shapes_in else None
        while frame and ("/torch/" in (file := frame.f_code.co_filename) or _is_ours(file)):
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename.endswith(self.shapes_in)

    def _follow(self, storage: Any, pool: str, op: str, site: str, category: str | None) -> None:
        super()._follow(storage, pool, op, site, category)
        if pool == HOST and self.places is None and any(maker.pinned for maker in self._makers):
            self._round(storage)

    def _round(self, storage: Any, pinned: bool = True) -> None:
        """Set the storage's size; pinned host memory is allocated in whole blocks."""
        size = storage.nbytes()
        known = self.record.storages[self._live[storage._cdata][0]]
        known.size = pinned_block(size) if pinned else size

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Count copies in this context as running beside the computation."""
        self._makers.append(ASIDE)
        try:
            yield
        finally:
            self._makers.pop()

    def _add(self, storage: Storage) -> int:
        storage.stream = side_streams.current().number if storage.pool == DEVICE else 0
        return super()._add(storage)

    # ---- Records of a trace adapter ----
    # These methods implement ``harness.planner.adapters.base.AllocationRecorder``.

    def pin(self, tensor: torch.Tensor, pinned: bool = True) -> None:
        """Record that a tensor of host memory is pinned, or is not, from its allocation on."""
        for plain in stored(tensor):
            storage = storage_of(plain)
            if storage is not None and storage._cdata in self._live:
                self._round(storage, pinned)

    def move(self, category: str, source: str, target: str) -> int:
        """Assign the storages of ``category`` in pool ``source`` to pool ``target``, from their
        allocation on; return their live bytes."""
        size = 0
        for storage in self.record.storages:
            if storage.pool == source and storage.category == category:
                storage.pool = target
                size += storage.size if storage.freed_in is None else 0
        return size

    def work(self, phase: str, kind: str, size: int, group: int = 0, stride: int = 1) -> None:
        """Record moved bytes that no op shows."""
        self.moved(phase, kind, "", 0, size, group, stride)

    def site(self) -> tuple[str, str | None]:
        """Return the innermost line of this project or a training library, and "recomputed" or
        None."""
        frame, site, category = sys._getframe(2), "", None
        may_recompute = self.phase == "backward"
        for _ in range(DEPTH):
            if frame is None:
                break
            file = frame.f_code.co_filename
            if may_recompute and file.endswith(RECOMPUTING):
                category = "recomputed"
            elif file.endswith(RUNNING_BACKWARD):
                may_recompute = False
            if not site and not _is_ours(file):
                site = _place(file, frame.f_lineno)
            frame = frame.f_back
        return site, category


def _is_ours(file: str) -> bool:
    return ADAPTERS not in file and any(own in file for own in OURSELVES)


def _all_of(mask: torch.Tensor) -> torch.Tensor:
    """Return the indices of all elements, as of a mask that is true everywhere.
    An example is a batch of texts of full length."""
    places, columns = torch.arange(mask.numel(), device=mask.device), []
    for size in reversed(mask.shape):
        columns.insert(0, places % size)
        places = places // size
    return torch.stack(columns, dim=1)


def _place(file: str, line: int) -> str:
    """Return ``file:line`` relative to the root or site-packages.
    Empty for files that explain nothing: torch's own, except its optimizers, and files in no
    package."""
    # The virtual environment of run.sh is below the root too, but is not the project's code.
    if file.startswith(OWN) and PACKAGES not in file:
        return f"{file[len(OWN) :]}:{line}"
    name = file.rpartition(PACKAGES)[2] if PACKAGES in file else ""
    tells = name and (not name.startswith("torch/") or name.startswith("torch/optim/"))
    return f"{name}:{line}" if tells else ""


WIRE = {"allreduce_": 2, "allreduce_coalesced_": 2, "all_reduce": 2}
"""Collective -> passes over the wire. An all-reduce is a reduce-scatter and an all-gather."""
PASSED = ("send", "recv_", "wait_tensor")
"""Operations that pass nothing to a group: from one rank to another, counted at the sender, and a
wait for a DTensor's collective."""
AWAITED = ("alltoall_base_", "allgather_")
"""Collectives within a layer. The next op waits for them, even if an engine overlaps others."""


FIELDS = ("phase", "kind", "dtype", "flops", "bytes", "group", "stride")
"""Fields of ``Work``, in the order of a tally's keys."""


class Counter:
    """Counter of the work of all traced ops since ``begin``.
    ``beside``: phases whose collectives overlap with the computation. ``neighbours``: (count,
    stride) of the ranks with parts of the same weights; their collectives are awaited."""

    def __init__(
        self,
        device: str,
        host: str | None,
        beside: Container[str] = (),
        neighbours: tuple[int, int] | None = None,
    ) -> None:
        self.device, self.host, self.beside = device, host, beside
        self.neighbours = neighbours
        self.formulas = formulas()
        self.tally: Tally[tuple[str, str, str, int, int, int, int]] = Tally()

    def begin(self) -> None:
        """Discard the work counted so far."""
        self.tally.clear()

    def see(self, phase: str, func: Any, args: Any, out: Any, beside: bool = False) -> None:
        """Count one op. ``beside``: a copy runs beside the computation."""
        ins, outs = _tensors(args), _tensors(out)
        if func.namespace in ("c10d", FUNCTIONAL):
            name = func._schema.name.rpartition("::")[2]
            if name == "send":  # doubled, because a group of two counts (2 - 1) / 2 of its bytes
                self.add(phase, "collective", "", 0, 2 * _bytes(ins), 2, _distance(args))
            if name in PASSED:
                return
            # The gathered or scattered tensor is the largest argument; its pieces do not count.
            size = max(_bytes(_tensors(arg)) for arg in (*args, out)) * WIRE.get(name, 1)
            among = _ranks(args)
            awaited = name in AWAITED or among == self.neighbours
            kind = "overlapped" if phase in self.beside and not awaited else "collective"
            self.add(phase, kind, "", 0, size, *among)
            return
        if not outs:  # those that an op changes (fused and foreach optimizers)
            named = zip(func._schema.arguments, args, strict=False)
            outs = _tensors([value for name, value in named
                             if name.alias_info and name.alias_info.is_write])  # fmt: skip
        if outs and not is_free(func):
            kind, *rest = self._kind(func, args, ins, outs, out)
            streamed = beside and kind == "transfer"
            self.add(phase, "streamed" if streamed else kind, *rest)

    def add(
        self,
        phase: str,
        kind: str,
        dtype: str,
        flops: int,
        size: int,
        group: int = 0,
        stride: int = 1,
    ) -> None:
        """Count work, also such as no op shows (a C++ reducer, a kernel left out of the trace)."""
        self.tally[phase, kind, dtype, flops, size, group, stride] += 1

    def work(self) -> list[Work]:
        """Return the work counted since ``begin``."""
        return [
            Work(**dict(zip(FIELDS, key, strict=True)), count=count)
            for key, count in self.tally.items()
        ]

    def _kind(
        self, func: Any, args: Any, ins: list[Any], outs: list[Any], out: Any
    ) -> tuple[str, str, int, int]:
        size, dtype = _bytes(ins) + _bytes(outs), str(outs[0].dtype).removeprefix("torch.")
        devices = {device_of(t).type for t in (*ins, *outs) if t.ndim}
        if self.host in devices and self.device in devices and self.host != self.device:
            return "transfer", "", 0, _bytes(outs)
        if self.host != self.device and devices == {self.host}:
            return "host", "", 0, size
        if func.namespace == "bitsandbytes" and func._overloadpacket not in self.formulas:
            self.formulas = formulas()  # a strategy has imported the library since
        formula = self.formulas.get(func._overloadpacket)
        if formula is None:
            return "memory", dtype, 0, size
        flops = int(formula(*args, out_val=out))
        name, on_gpu = func._schema.name, self.device != "cpu"
        if dtype == "float32" and on_gpu and "convolution" in name:
            # cuDNN's default; matrix products follow the recipe instead (``roofline.seconds``).
            dtype = "tf32" if torch.backends.cudnn.allow_tf32 else dtype
        if "attention" in name:
            return "attention", dtype, flops, size
        # A product of float8 operands (``aten._scaled_mm``) gives a wider type.
        eight = ins and ins[0].dtype.itemsize == 1 and ins[0].is_floating_point()
        return "product", FLOAT8 if eight else dtype, flops, size


def _ranks(args: Any) -> tuple[int, int]:
    """Return the number of ranks of a collective and their stride; (0, 1) for all ranks."""
    from torch.distributed import distributed_c10d as c10d

    words = [value for value in args if isinstance(value, str)]  # a functional one's group is last
    name = getattr(group_of(args), "group_name", words[-1] if words else "")
    if not name:
        return 0, 1
    ranks = c10d.get_process_group_ranks(c10d._resolve_process_group(name))
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return (0, 1) if len(ranks) == c10d.get_world_size() else (len(ranks), stride)


def _distance(args: Any) -> int:
    """Return the distance to the rank that receives a tensor."""
    from torch.distributed import distributed_c10d as c10d

    group = c10d._resolve_process_group(group_of(args).group_name)
    peer = next(value for value in args if isinstance(value, int))
    return abs(c10d.get_process_group_ranks(group)[peer] - c10d.get_rank())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) in (list, tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _bytes(tensors: list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
