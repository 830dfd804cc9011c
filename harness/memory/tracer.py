"""Every tensor storage that is made and freed while a training runs: the one tracer.

A measured run follows one of its steps with it, on real tensors (``harness.memory.traced_step``); a
prediction follows a training from its first line on, on tensors without storage
(``harness.planner.tracing.trace``).
"""

from __future__ import annotations

import contextlib
import functools
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
from strategies.base import pinned_block
from strategies.engine import TrainingRun
from strategies.evidence.readings import stored, within, wrapped
from strategies.inventory import AllocationScope

# ---- awaited ----
# Tensors that a communication thread still holds for a moment after its work was waited for.
#
# gloo's threads drop a collective's tensors when they get to it, after ``wait()`` has returned
# (ProcessGroupGloo::runLoop). A peak that falls into this moment counts them, on a busy machine
# more often: repeated traces of one FSDP2 step were up to 4 % apart. So a trace of real ranks on a
# CPU lets those threads have their turn before it counts a new maximum. On a GPU memory is given
# back in the order of a stream, and nothing is to be waited for.


PAUSE = 0.01
"""Seconds for the threads of two busy cores to get their turn; once for each work waited for."""


@contextlib.contextmanager
def awaited(noticed: Callable[[], None]) -> Iterator[None]:
    """While it lasts, ``noticed`` is called when a work of gloo has been waited for."""
    if not (dist.is_available() and dist.is_initialized() and "gloo" in dist.get_backend()):
        yield
        return
    wait = dist.Work.wait

    def waited(work: Any, *given: Any, **more: Any) -> Any:
        done = wait(work, *given, **more)
        noticed()
        return done

    with mock.patch.object(dist.Work, "wait", waited):
        yield


def pause() -> None:
    """Let other threads run: this one sleeps, and holds no lock of the interpreter."""
    time.sleep(PAUSE)


# ---- resizing ----
# Storages that change their size under tensors that stay: a library so lets go of memory and takes
# it again, and no op tells (FSDP2 does it with gathered weights).


@contextlib.contextmanager
def watched(noticed: Callable[[Any], None]) -> Iterator[None]:
    """While it lasts, ``noticed`` is called with each storage that was resized."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, size: int) -> Any:
        done = resize(storage, size)
        noticed(storage)
        return done

    with mock.patch.object(torch.UntypedStorage, "resize_", resized):
        yield


# ---- places ----
# Where a training's tensors are kept, where their devices cannot tell: a CPU as the device.
#
# There host memory is both the device and the host that an offload moves things to. A tensor is in
# host memory if the engine or a strategy keeps it there (``Holdings.host``,
# ``Attachment.hosted``), if a method made it there (``Maker.place``), or if it was computed from
# such tensors alone: an operation runs where its operands are. All else is on the device.
#
# On a GPU an operation of tensors in two places fails, so a library copies to the device first; on
# a CPU that copy is left out (``Tensor.to`` returns what it was given). Where the engine's library
# or a collective takes both, the copies are counted on the device as long as the operation lasts.
# Where forward itself does, a place that was named is wrong: the places of such a step are not
# believed, and everything counts as on the device. What stays unseen: a tensor that a library
# copies to the device and converts there by itself counts as in host memory, for the length of an
# operation.


DEVICE, HOST = "device", "host"
BY_DEVICE = "each tensor's own device"
BY_ENGINE = "the engine's placement; on a CPU both are host memory"
COPIES = frozenset({"copy_", "_to_copy", "_foreach_copy_", "set_"})
"""Operations of aten that may take operands in two places."""
MOVING = frozenset({"c10d", "_c10d_functional"})
"""Namespaces of operations that send: what a copy to the device would have been for."""


def storage_of(tensor: torch.Tensor) -> Any | None:
    """The storage of a plain tensor; None for a layout, or a subclass, without one of its own."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


class TensorPlacement:
    """Which storages that live now are in host memory. ``joined``: operations of forward that took
    operands in both places, by name."""

    def __init__(self) -> None:
        self.hosted: set[int] = set()
        self.joined: Counter[str] = Counter()

    def put(self, key: int, pool: str) -> None:
        """A storage, by its address, is kept in ``pool`` from now on."""
        (self.hosted.add if pool == HOST else self.hosted.discard)(key)

    def forget(self, key: int) -> None:
        """A storage has died: its address may be another's."""
        self.hosted.discard(key)

    def of_operands(self, values: Any) -> str:
        """Where an operation's result is: in host memory if all its operands are."""
        keys = [key for key, _ in _operands(values)] if self.hosted else []
        return HOST if keys and self.hosted.issuperset(keys) else DEVICE

    def copied(self, func: Any, values: Any, phase: str, in_library: bool) -> int:
        """Bytes that a GPU would copy to the device for this operation. What forward does outside
        the engine's library is noted in ``joined``, for no GPU would."""
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
        """How the places of a step were known; begins with "unknown" where they were not."""
        if not self.joined:
            return BY_ENGINE
        (name, _), calls = self.joined.most_common(1)[0], self.joined.total()
        return f"unknown: {calls} operations of forward took operands in both places, as {name}"


def _name(func: Any) -> str:
    return func._schema.name.partition("::")[2]


def _operands(values: Any) -> list[tuple[int, int]]:
    """What identifies the storage of each operand, and the operand's bytes; a number as a tensor
    may be anywhere."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    plain = [(tensor, storage_of(tensor)) for leaf in leaves for tensor in stored(leaf)]
    return [(storage._cdata, tensor.nbytes) for tensor, storage in plain if storage is not None]


aten = torch.ops.aten
BEFORE = "before"
"""The phase of what lives before a traced step begins."""


class Tracer(TorchDispatchMode):
    """Follows storages on the devices in ``pools`` (device type -> pool name).

    It keeps no reference to a tensor, so that it does not lengthen the life of what it counts.
    Source of the idea: torch.distributed._tools.MemTracker.
    """

    def __init__(self, pools: dict[str, str]) -> None:
        super().__init__()
        self.pools, self.phase = pools, "start"
        self.record = Record(storages=[], events=[], marks=[])
        self.ops: set[str] = set()
        self.casts = True
        """Whether a low-precision copy of a weight is autocast's."""
        self.hidden = False
        """Whether views come out of ops whose storages were never seen (DDP's buckets, in C++)."""
        self._live: dict[int, tuple[int, Any]] = {}
        self.left_out: set[int] = set()
        """Storages, by address, that are not counted: forgotten when they die."""
        self._refs: dict[int, Any] = {}
        self._makers: list[AllocationScope] = []
        self.places = TensorPlacement() if pools.get("cpu") == DEVICE else None
        """Where tensors are kept, where their devices cannot tell; None where these do."""
        self._hollow: dict[int, tuple[str, Any]] = {}
        self._watching = contextlib.ExitStack()
        self._waited = False
        """Whether a collective was waited for since threads last had their turn."""
        self._total, self._highest = 0, 0

    def __enter__(self) -> Any:
        self._watching.enter_context(watched(self._resized))
        self._watching.enter_context(awaited(self._wait))
        return super().__enter__()

    def __exit__(self, *given: Any) -> None:
        self._watching.close()
        super().__exit__(*given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.followed(func, types, args, kwargs or {})

    def followed(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What an op gives, once it is noted."""
        if wrapped(types):
            return NotImplemented
        out = self.run(func, args, kwargs)
        self.ran(func, args, kwargs, out)
        return out

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an op gives."""
        return func(*args, **kwargs)

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Where a plain tensor lies."""
        return tensor.device

    # ---- events ----

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note what an op has made."""
        self.ops.add(str(func))
        self._copy_operands(func, (args, kwargs))
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
        """Note a tensor's storages if they are new and lie on a device that is followed."""
        for plain in stored(tensor):
            pool = self.pools.get(self.device_of(plain).type)
            storage = storage_of(plain) if pool else None
            if storage is not None and not self._known(storage) and storage.nbytes():
                site, category = self.site()
                made_as = self._made_as()
                if made_as and storage._cdata in _storages_of(args):
                    made_as = None  # a view of what C++ made: gloo's copy of what it reduces
                category = made_as or category or self._cast_of_weight(func, args)
                self._follow(storage, self._place(args) or pool, str(func), site, category)

    def hold(self, pool: str, size: int, op: str, category: str) -> Callable[[], None]:
        """Bytes that no op of this process makes (a C++ bucket, a workspace); call to free."""
        index = self._add(Storage(size, pool, self.phase, op, self.site()[0], category))

        def free() -> None:
            self._free(None, index)

        return free

    def leave_out(self, tensors: Iterable[Any]) -> None:
        """Count these storages no longer, or never."""
        for tensor in tensors:
            storage = storage_of(tensor) if torch.is_tensor(tensor) else None
            if storage is None:
                continue
            key = storage._cdata
            if key not in self.left_out:
                self.left_out.add(key)
                # The address of a storage that died may be another's.
                forget = functools.partial(self._forget, key)
                self._refs[key] = weakref.ref(storage, forget)
            if key in self._live:
                self._free(None, self._live.pop(key)[0])

    def tag(self, category: str, tensors: Iterable[Any]) -> None:
        """Say what tensors that live now are; what already has a category keeps it."""
        for tensor in tensors:
            for plain in stored(tensor):
                storage = storage_of(plain)
                if storage is not None and storage._cdata in self._live:
                    known = self.record.storages[self._live[storage._cdata][0]]
                    known.category = known.category or category

    def keep_on(self, pool: str, tensors: Iterable[Any]) -> None:
        """Say where tensors that live now are kept, from the start of the trace on."""
        for tensor in tensors:
            for plain in stored(tensor):
                storage = storage_of(plain)
                if storage is not None and storage._cdata in self._live:
                    self.record.storages[self._live[storage._cdata][0]].pool = pool
                    self.places.put(storage._cdata, pool)

    def know(self, trained: TrainingRun) -> None:
        """Name what lives between two steps, and where it is kept, as the engine and the strategies
        say."""
        self.casts = "float_master" not in trained.launch.traits
        holdings = trained.engine.held(trained)
        kept = [t for a in trained.attached.values() for t in a.tensors()]
        for category in ("parameters", "optimizer_state"):
            self.tag(category, holdings.tensors.get(category, ()))
        self.tag("parameters", [t for a in trained.attached.values() for t in a.weights()])
        self.tag("ema", kept)
        for category, tensors in holdings.tensors.items():
            self.tag(category, tensors)
        self.tag_gradients(trained)
        self.keep_held(trained)

    def keep_held(self, trained: TrainingRun) -> None:
        """Say where what the engine and the strategies hold is kept, if tensors' devices cannot."""
        if self.places is not None:
            kept = [t for a in trained.attached.values() for t in a.hosted()]
            self.keep_on(HOST, [*trained.engine.held(trained).host, *kept])

    def disbelieve(self) -> None:
        """Count everything as on the device if forward showed that a place is wrong."""
        if self.places is not None and self.places.joined:
            for storage in self.record.storages:
                storage.pool = DEVICE if storage.pool == HOST else storage.pool

    def tag_gradients(self, trained: TrainingRun) -> None:
        """Name what the parameters hold as ``.grad``."""
        self.tag("gradients", [p.grad for p in trained.module.parameters() if p.grad is not None])

    @contextlib.contextmanager
    def watching(self, makers: Iterable[AllocationScope]) -> Iterator[None]:
        """While it lasts, what these methods allocate is of the category that ``Maker`` names."""
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

    # ---- the record ----

    def site(self) -> tuple[str, str | None]:
        """The source line that asks for what is made now, and the category that it shows."""
        return "", None

    def _made_as(self) -> str | None:
        """The category that the innermost maker at work gives in this phase."""
        for maker in reversed(self._makers):
            if maker.category and (not maker.phases or self.phase in maker.phases):
                return maker.category
        return None

    def _copy_operands(self, func: Any, values: Any) -> None:
        """Count the copies of operands on the device that a CPU leaves out."""
        if self.places is None:
            return
        copied = self.places.copied(func, values, self.phase, in_library=bool(self._makers))
        if copied:
            self.hold(DEVICE, copied, f"copies for {func}", self._made_as() or "temporaries")()

    def _place(self, args: Any) -> str | None:
        """The pool that the innermost maker names, or that of the operands; None where tensors'
        devices tell."""
        if self.places is None:
            return None
        named = (maker.place for maker in reversed(self._makers) if maker.place)
        return next(named, None) or self.places.of_operands(args)

    def _cast_of_weight(self, func: Any, args: Any) -> str | None:
        """Autocast's low-precision copy of a weight, kept until backward has used it."""
        if func is not aten._to_copy.default or self.phase != "forward" or not self.casts:
            return None
        source = args[0]
        is_weight = isinstance(source, torch.Tensor) and source.is_leaf and source.requires_grad
        return "autocast" if is_weight else None

    def _known(self, storage: Any) -> bool:
        return storage._cdata in self._live or storage._cdata in self.left_out

    def _forget(self, key: int, _: Any) -> None:
        self.left_out.discard(key)

    def _follow(self, storage: Any, pool: str, op: str, site: str, category: str | None) -> None:
        key = storage._cdata
        index = self._add(Storage(self._taken(storage), pool, self.phase, op, site, category))
        if self.places is not None:
            self.places.put(key, pool)
        self._live[key] = (index, weakref.ref(storage, lambda _: self._free(key, index)))

    def _taken(self, storage: Any) -> int:
        """Bytes that a storage takes: whole blocks where torch's allocator pinned it for a GPU, its
        own size where it was registered (``strategies.streaming.weights``)."""
        size, registered = storage.nbytes(), getattr(storage, "registered", False)
        if self.places is not None or storage.device.type != "cpu" or registered:
            return size
        with _disable_current_modes():
            return pinned_block(size) if storage.is_pinned() else size

    def _resized(self, storage: Any) -> None:
        """A storage has another size: what it held is freed, and what it holds is made now."""
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
            forget = functools.partial(self._filled, key)
            self._hollow[key] = (pool, weakref.ref(storage, forget))

    def _filled(self, key: int, _: Any) -> None:
        self._hollow.pop(key, None)

    def _wait(self) -> None:
        self._waited = True

    def _grow(self, size: int) -> None:
        """Before a new maximum, what communication has done with is let go of."""
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
        self._live.pop(key, None)
        if self.places is not None and key is not None:
            self.places.forget(key)
        self._total -= self.record.storages[index].size
        self.record.storages[index].freed_in = self.phase
        self.record.events.append((-1, index))


def _storages_of(values: Any) -> set[int]:
    """What identifies the storages of the tensors in a structure of arguments."""
    plain = (p for t in within(values) for p in stored(t))
    return {storage._cdata for p in plain if (storage := storage_of(p)) is not None}
