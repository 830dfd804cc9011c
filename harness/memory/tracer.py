"""Tracer of every tensor storage that a training allocates and frees.

A measured run traces one of its steps, with real tensors (``harness.memory.traced_step``). A
prediction traces a training from its first line, with tensors without storage
(``harness.planner.tracing.trace``).
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from harness.memory import op_facts
from harness.memory.record import Record, Storage
from harness.result import UNPLACED
from strategies.base import pinned_block
from strategies.engine import TrainingRun
from strategies.evidence.readings import stored, within, wrapped
from strategies.inventory import AllocationScope

PAUSE = 0.01
"""Seconds for the threads of two busy cores to run, once per collective that was waited for."""


def pause() -> None:
    """Let other threads run: sleep without the interpreter lock."""
    time.sleep(PAUSE)


@contextlib.contextmanager
def after(owner: Any, method: str, noticed: Callable[[Any], None]) -> Iterator[None]:
    """Within this context, call ``noticed`` with the object of each call of ``owner.method``, after
    it."""
    plain = getattr(owner, method)

    def watched(thing: Any, *given: Any, **more: Any) -> Any:
        done = plain(thing, *given, **more)
        noticed(thing)
        return done

    with mock.patch.object(owner, method, watched):
        yield


# ---- tensor placement ----
# If the CPU is the device, a tensor's device does not tell device memory from offloaded memory. A
# tensor counts as in host memory in three cases: the engine or a strategy keeps it there
# (``TensorInventory.host``, ``Attachment.hosted``), a method allocated it there
# (``AllocationScope.place``), or all operands of the op that computed it are there. All other
# tensors are on the device.
#
# On a GPU an operation with operands in two places fails, so a library copies to the device first.
# On a CPU ``Tensor.to`` returns its input and the copy is missing. If the engine's library or a
# collective takes both, the copies count as device memory during the operation. If forward itself
# takes both, a placement is wrong. Then the placements of that step are discarded, and everything
# counts as on the device. One case stays hidden: a tensor that a library copies to the device and
# converts there counts as in host memory during that operation.


DEVICE, HOST = "device", "host"
BY_DEVICE = "each tensor's own device"
BY_ENGINE = "the engine's placement; on a CPU both are host memory"
COPIES = frozenset({"copy_", "_to_copy", "_foreach_copy_", "set_"})
"""aten operations that may take operands in two places."""
MOVING = frozenset({"c10d", "_c10d_functional"})
"""Namespaces of communication ops, for whose operands a GPU would need a copy on the device."""


def storage_of(tensor: torch.Tensor) -> Any | None:
    """Return the storage of a plain tensor; None for a layout or subclass without its own
    storage."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


class TensorPlacement:
    """Set of the live storages in host memory.

    ``joined`` counts forward operations with operands in both places, by name.
    """

    def __init__(self) -> None:
        self.hosted: set[int] = set()
        self.joined: Counter[str] = Counter()

    def put(self, key: int, pool: str) -> None:
        """Set the pool of the storage at this address."""
        (self.hosted.add if pool == HOST else self.hosted.discard)(key)

    def of_operands(self, values: Any) -> str:
        """Return the placement of an operation's result: host memory if all its operands are
        there."""
        keys = [key for key, _ in _operands(values)] if self.hosted else []
        return HOST if keys and self.hosted.issuperset(keys) else DEVICE

    def copied(self, func: Any, values: Any, phase: str, in_library: bool) -> int:
        """Return the bytes that a GPU would copy to the device for this operation.

        An operation that forward runs outside the engine's library is counted in ``joined``
        instead, because a GPU could not run it.
        """
        if not self.hosted or _name(func) in COPIES:
            return 0
        operands = _operands(values)
        here = sum(size for key, size in operands if key in self.hosted)
        if not here or self.hosted.issuperset(key for key, _ in operands):
            return 0
        if in_library or func.namespace in MOVING:
            return here
        if phase == "forward":
            self.joined[str(func)] += 1
        return 0

    @property
    def known_by(self) -> str:
        """Return the source of a step's placements; it begins with "unknown" if they were
        discarded."""
        if not self.joined:
            return BY_ENGINE
        (name, _), calls = self.joined.most_common(1)[0], self.joined.total()
        return f"{UNPLACED}{calls} operations of forward took operands in both places, as {name}"


def _name(func: Any) -> str:
    return func._schema.name.partition("::")[2]


def _operands(values: Any) -> list[tuple[int, int]]:
    """Return the storage identifier and bytes of each operand, without zero-dimensional tensors,
    which may be on any device."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    plain = [(tensor, storage_of(tensor)) for leaf in leaves for tensor in stored(leaf)]
    return [(storage._cdata, tensor.nbytes) for tensor, storage in plain if storage is not None]


aten = torch.ops.aten
BEFORE = "before"
"""Phase of storages that are alive before a traced step begins."""


class Tracer(TorchDispatchMode):
    """Traces storages on the devices in ``pools`` (device type -> pool name).

    It keeps no reference to a tensor, so it does not extend a tensor's lifetime. The idea is from
    torch.distributed._tools.MemTracker.
    """

    def __init__(self, pools: dict[str, str]) -> None:
        super().__init__()
        self.pools, self.phase = pools, "start"
        self.record = Record(storages=[], events=[], marks=[])
        self.ops: set[str] = set()
        self.casts = True
        """True if a low-precision copy of a weight counts as autocast's."""
        self.hidden = False
        """True if ops return views of storages that were never traced (DDP's buckets, in C++)."""
        self._live: dict[int, tuple[int, Any]] = {}
        self.left_out: set[int] = set()
        """Addresses of storages that are not counted; an address is removed when its storage
        dies."""
        self._refs: dict[int, Any] = {}
        self._makers: list[AllocationScope] = []
        self.places = TensorPlacement() if pools.get("cpu") == DEVICE else None
        """Placement of tensors if their devices do not show it; else None."""
        self._hollow: dict[int, tuple[str, Any]] = {}
        self._watching, self._entered = contextlib.ExitStack(), 0
        self._waited = False
        """True if a collective was waited for since the last pause."""
        self._total, self._highest = 0, 0

    def __enter__(self) -> Any:
        if not self._entered:  # a compiled graph's random operations enter it again
            # A library can free and reallocate memory by resizing a storage under its tensors,
            # which no op shows. FSDP2 does so with gathered weights.
            self._watching.enter_context(after(torch.UntypedStorage, "resize_", self._resized))
            if dist.is_available() and dist.is_initialized() and "gloo" in dist.get_backend():
                self._watching.enter_context(after(dist.Work, "wait", self._wait))
        self._entered += 1
        return super().__enter__()

    def __exit__(self, *given: Any) -> None:
        self._entered -= 1
        if not self._entered:
            self._watching.close()
        super().__exit__(*given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.followed(func, types, args, kwargs or {})

    def followed(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op, record it, and return its result."""
        if wrapped(types):
            return NotImplemented
        out = self.run(func, args, kwargs)
        self.ran(func, args, kwargs, out)
        return out

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return an op's result."""
        return func(*args, **kwargs)

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Return the device of a plain tensor."""
        return tensor.device

    # ---- events ----

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the results of an op."""
        self.ops.add(str(func))
        if self.places is not None:  # the copies of operands on the device that a CPU omits
            library = bool(self._makers)
            copied = self.places.copied(func, (args, kwargs), self.phase, in_library=library)
            if copied:
                category = self._made_as() or "temporaries"
                self.hold(DEVICE, copied, f"copies for {func}", category)()
        inside = op_facts.scratch(func, args)
        if inside:
            self.hold(DEVICE, inside, str(func), "temporaries")()
        given = _storages_of((args, kwargs)) if self.hidden else frozenset()
        for leaf in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not (given and _storages_of(leaf) & given):
                self.see(leaf, func, args)

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase
        self.record.marks.append((len(self.record.events), phase))

    def see(self, tensor: torch.Tensor, func: Any, args: Any = ()) -> None:
        """Record a tensor's storages that are new and on a traced device."""
        for plain in stored(tensor):
            pool = self.pools.get(self.device_of(plain).type)
            storage = storage_of(plain) if pool else None
            if pool and storage is not None and not self._known(storage) and storage.nbytes():
                site, category = self.site()
                made_as = self._made_as()
                if made_as and storage._cdata in _storages_of(args):
                    made_as = None  # a view of C++ memory: gloo's copy of its operand
                category = made_as or category or self._cast_of_weight(func, args)
                self._follow(storage, self._place(args) or pool, str(func), site, category)

    def hold(self, pool: str, size: int, op: str, category: str) -> Callable[[], None]:
        """Record bytes that no op of this process allocates (a C++ bucket, a workspace). Call the
        returned function to free them."""
        index = self._add(Storage(size, pool, self.phase, op, self.site()[0], category))

        def free() -> None:
            self._free(None, index)

        return free

    def leave_out(self, tensors: Iterable[Any]) -> None:
        """Exclude these storages from the trace."""
        for tensor in tensors:
            storage = storage_of(tensor) if torch.is_tensor(tensor) else None
            if storage is None:
                continue
            key = storage._cdata
            if key not in self.left_out:
                self.left_out.add(key)

                def gone(_: Any, key: int = key) -> None:
                    self.left_out.discard(key)  # a freed storage's address may be reused

                self._refs[key] = weakref.ref(storage, gone)
            if key in self._live:
                self._free(None, self._live.pop(key)[0])

    def _followed(self, tensors: Iterable[Any]) -> Iterator[tuple[int, Storage]]:
        """Yield the address and record of these tensors' storages that are live."""
        for plain in (plain for tensor in tensors for plain in stored(tensor)):
            storage = storage_of(plain)
            if storage is not None and storage._cdata in self._live:
                yield storage._cdata, self.record.storages[self._live[storage._cdata][0]]

    def tag(self, category: str, tensors: Iterable[Any]) -> None:
        """Set the category of live tensors that have none."""
        for _, known in self._followed(tensors):
            known.category = known.category or category

    def keep_on(self, pool: str, tensors: Iterable[Any]) -> None:
        """Set the pool of live tensors, from the start of the trace on."""
        for key, known in self._followed(tensors):
            known.pool = pool
            if self.places is not None:
                self.places.put(key, pool)

    def know(self, run: TrainingRun) -> None:
        """Set category and placement of the tensors alive between two steps, as the engine and the
        strategies report them."""
        self.casts = "float_master" not in run.launch.traits
        inventory = run.engine.held(run)
        kept = [t for a in run.attached.values() for t in a.tensors()]
        for category in ("parameters", "optimizer_state"):
            self.tag(category, inventory.tensors.get(category, ()))
        self.tag("parameters", [t for a in run.attached.values() for t in a.weights()])
        self.tag("ema", kept)
        for category, tensors in inventory.tensors.items():
            self.tag(category, tensors)
        self.tag_gradients(run)
        self.keep_held(run)

    def keep_held(self, run: TrainingRun) -> None:
        """Set the placement of the tensors held by engine and strategies, if their devices do not
        show it."""
        if self.places is not None:
            kept = [t for a in run.attached.values() for t in a.hosted()]
            self.keep_on(HOST, [*run.engine.held(run).host, *kept])

    def disbelieve(self) -> None:
        """Count everything as on the device if forward has shown a wrong placement."""
        if self.places is not None and self.places.joined:
            for storage in self.record.storages:
                storage.pool = DEVICE if storage.pool == HOST else storage.pool

    def tag_gradients(self, run: TrainingRun) -> None:
        """Set the category of the parameters' ``.grad``."""
        self.tag("gradients", [p.grad for p in run.module.parameters() if p.grad is not None])

    @contextlib.contextmanager
    def watching(self, makers: Iterable[AllocationScope]) -> Iterator[None]:
        """Within this context, give allocations of these methods the category of their scope."""
        with contextlib.ExitStack() as stack:
            for maker in makers:
                inside = self._inside(maker, getattr(maker.owner, maker.method))
                stack.enter_context(mock.patch.object(maker.owner, maker.method, inside))
            yield

    def _inside(self, maker: AllocationScope, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **more: Any) -> Any:
            self._makers.append(maker)
            try:
                return method(*given, **more)
            finally:
                self._makers.pop()

        return run

    # ---- record ----

    def site(self) -> tuple[str, str | None]:
        """Return the source line of the current allocation, and the category that it implies."""
        return "", None

    def _made_as(self) -> str | None:
        """Return the category that the innermost active scope gives in this phase."""
        for maker in reversed(self._makers):
            if maker.category and (not maker.phases or self.phase in maker.phases):
                return maker.category
        return None

    def _place(self, args: Any) -> str | None:
        """Return the pool of the innermost scope or of the operands; None if tensors' devices show
        it."""
        if self.places is None:
            return None
        named = (maker.place for maker in reversed(self._makers) if maker.place)
        return next(named, None) or self.places.of_operands(args)

    def _cast_of_weight(self, func: Any, args: Any) -> str | None:
        """Return the category of autocast's low-precision copy of a weight, which lives until
        backward has used it."""
        if func is not aten._to_copy.default or self.phase != "forward" or not self.casts:
            return None
        source = args[0]
        is_weight = isinstance(source, torch.Tensor) and source.is_leaf and source.requires_grad
        return "autocast" if is_weight else None

    def _known(self, storage: Any) -> bool:
        return storage._cdata in self._live or storage._cdata in self.left_out

    def _follow(self, storage: Any, pool: str, op: str, site: str, category: str | None) -> None:
        key = storage._cdata
        index = self._add(Storage(self._taken(storage), pool, self.phase, op, site, category))
        if self.places is not None:
            self.places.put(key, pool)
        self._live[key] = (index, weakref.ref(storage, lambda _: self._free(key, index)))

    def _taken(self, storage: Any) -> int:
        """Return the bytes that a storage occupies.

        They are whole blocks if torch's allocator pinned it for a GPU, and its own size if it was
        registered (``strategies.streaming.weights``).
        """
        size, registered = storage.nbytes(), getattr(storage, "registered", False)
        if self.places is not None or storage.device.type != "cpu" or registered:
            return size
        with _disable_current_modes():
            return pinned_block(size) if storage.is_pinned() else size

    def _resized(self, storage: Any) -> None:
        """Record a resized storage: free its old bytes, allocate the new ones."""
        key, pool = storage._cdata, self.pools.get(storage.device.type)
        if key in self.left_out:
            return
        if key in self._live:
            index = self._live[key][0]
            pool = self.record.storages[index].pool
            self._free(key, index)
        elif key in self._hollow:
            pool = self._hollow.pop(key)[0]
        if storage.nbytes() and pool:
            self._follow(storage, pool, "resize_", self.site()[0], self._made_as())
        elif pool:
            gone = weakref.ref(storage, lambda _: self._hollow.pop(key, None))
            self._hollow[key] = (pool, gone)

    def _wait(self, _: Any = None) -> None:
        self._waited = True

    def _grow(self, size: int) -> None:
        """Before a new maximum, let communication threads release finished tensors.

        gloo's threads release a collective's tensors only some time after ``wait()`` has returned
        (ProcessGroupGloo::runLoop). A peak in this interval counts them, more often on a busy
        machine: repeated traces of one FSDP2 step differed by up to 4 %. On a GPU memory is freed
        in stream order.
        """
        if self._waited and self._total + size > self._highest:
            pause()
            self._waited = False
        self._total += size
        self._highest = max(self._highest, self._total)

    def _add(self, storage: Storage) -> int:
        self._grow(storage.size)
        self.record.storages.append(storage)
        index = len(self.record.storages) - 1
        self.record.events.append((+1, index))
        return index

    def _free(self, key: int | None, index: int) -> None:
        if key is not None and self._live.get(key, (None,))[0] != index:
            return
        if key is not None:
            self._live.pop(key, None)
            if self.places is not None:
                self.places.hosted.discard(key)  # its address may be reused
        self._total -= self.record.storages[index].size
        self.record.storages[index].freed_in = self.phase
        self.record.events.append((-1, index))


def _storages_of(values: Any) -> set[int]:
    """Return identifiers of the storages of all tensors in a structure of arguments."""
    plain = (p for t in within(values) for p in stored(t))
    return {storage._cdata for p in plain if (storage := storage_of(p)) is not None}
