"""Cache of operations on fake tensors, shared by all traces of a process.
Its key is short, and it holds only plain operations: those that make new tensors or write to one
operand. Views and collectives run directly. ``FakeTensorMode``'s own cache, which is on by default
(``torch._dynamo.config.fake_tensor_cache_enabled``), serves all others."""

from __future__ import annotations

import base64
import functools
import pickle
from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch._library.utils import is_builtin
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves

from harness.memory.op_facts import is_free

MAKES, WRITES, FILLS, VIEWS, SENDS, OTHER = "makes", "writes", "fills", "views", "sends", "other"
UNTOLD = frozenset({
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view,
})  # fmt: skip
HIDDEN_VIEW = "aten::_unsafe_view"
COLLECTIVES = frozenset({
    *("_allgather_base_", "_reduce_scatter_base_", "allreduce_", "broadcast_"),
})  # fmt: skip
"""Collectives of c10d that return their operands."""
LIFTED = frozenset({"aten::lift", "aten::lift_fresh", "aten::lift_fresh_copy"})
PLAIN = frozenset({
    *(int, float, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
})  # fmt: skip
META = torch.device("meta")
MOST = 100_000
"""Most entries, enough for some hundred traces."""


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return a tensor's device; for a fake tensor without a call of torch's dispatcher."""
    if type(tensor) is FakeTensor:
        return META if tensor.fake_mode.in_kernel_invocation else tensor.fake_device
    return tensor.device


class Made(NamedTuple):
    """Metadata of a new tensor that an operation makes."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Untold(Exception):
    """An operand that a key cannot describe fully."""


Key = tuple[Any, ...]
_KNOWN: dict[Key, Any] = {}
"""Entries of all traces of this process, oldest first."""


def known() -> int:
    """Return the number of entries."""
    return len(_KNOWN)


def learned(before: int) -> str:
    """Return the entries after the first ``before`` as text, which ``learn`` reads in another
    process."""
    new = islice(_KNOWN.items(), before, None)
    entries = [(str(func), rest, made) for (func, *rest), made in new]
    return base64.b64encode(pickle.dumps(entries)).decode()


def learn(text: str) -> None:
    """Add the entries in a text of ``learned``, from a process with the same libraries."""
    found = pickle.loads(base64.b64decode(text))
    if len(_KNOWN) + len(found) > MOST:
        _KNOWN.clear()
    _KNOWN.update(((_operation(name), *rest), made) for name, rest, made in found)


@functools.cache
def _operation(name: str) -> Any:
    """Return the operation of that name, such as ``aten.mul.Tensor``."""
    return functools.reduce(getattr, name.split("."), torch.ops)


class OpCache:
    """Run operations under one fake tensor mode, from the cache if possible.
    Torch's cache alone takes 1.5 to 2.1 times the processor time, because its key takes longer to
    make than many operations to run. Torch 2.13: flux-dev with LoRA 10.2 s instead of 4.7,
    wan2.1-1.3b 3.8 instead of 2.1, sd3.5-medium under fsdp2 14.3 instead of 9.0, DiT-XL/2 3.0
    instead of 1.6. Source of the rules: torch 2.13, torch/_subclasses/fake_tensor.py
    (``_cache_key``, ``_validate_cache_key``, ``_get_output_tensor_from_cache_entry``)."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self.fake = fake
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of ``func``."""
        effect = _effect(func)
        if effect == OTHER:
            return func(*args, **kwargs)
        if effect == VIEWS:
            return self._view(func, args, kwargs)
        if effect == SENDS:
            leaves = [
                leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
            ]
            if not all(type(leaf) is FakeTensor and self._plain(leaf) for leaf in leaves):
                return func(*args, **kwargs)
            with in_kernel_invocation_manager(self.fake):  # its results are its operands
                return func(*args, **kwargs)
        try:
            key = self._key(func, args, kwargs)
        except Untold:
            return func(*args, **kwargs)
        made = _KNOWN.get(key)
        if made is None:
            shape = kwargs["out"].shape if effect == FILLS else None
            out = func(*args, **kwargs)
            if effect == MAKES:
                _KNOWN[key] = self._metadata_of(out, args)
            else:  # filling may have resized the tensor
                _KNOWN[key] = OTHER if effect == FILLS and out.shape != shape else effect
            return out
        if made == OTHER:
            return func(*args, **kwargs)
        if made == WRITES:
            return args[0]
        if made == FILLS:
            return kwargs["out"]
        if type(made) is Made:
            return self._made(made)
        kind, each = made
        return kind(None if one is None else self._made(one) for one in each)

    def _key(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        self._tell(args, key)
        for name, value in kwargs.items():
            key.append(name)
            self._tell((value,), key)
        return tuple(key)

    def _tell(self, values: Iterable[Any], key: list[Any]) -> None:
        """Append everything in ``values`` that affects the result to ``key``."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if not self._plain(value):
                    raise Untold
                key += (value.dtype, value.fake_device, value.requires_grad, value.shape)
                key += (value.stride(), value.storage_offset())
            elif kind in PLAIN:
                key += (kind, value)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                self._tell(value, key)
            elif isinstance(value, torch._C.Generator):  # no fake tensor draws from it
                key.append(kind)
            else:
                raise Untold

    def _plain(self, tensor: FakeTensor) -> bool:
        ours = tensor.fake_mode is self.fake and tensor.constant is None
        return ours and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())

    def _metadata_of(self, out: Any, args: Any) -> Any:
        """Return the metadata from which ``_again`` makes ``out``, or ``OTHER`` if that is not
        possible."""
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args)
                 if isinstance(leaf, torch.Tensor)}  # fmt: skip
        if type(out) in (list, tuple):
            made = [None if each is None else self._metadata_of_one(each, given) for each in out]
            return OTHER if OTHER in made else (type(out), made)
        return self._metadata_of_one(out, given)

    def _metadata_of_one(self, out: Any, given: set[int]) -> Any:
        if type(out) is not FakeTensor or not self._plain(out):
            return OTHER
        storage = out.untyped_storage()
        extent = sum((size - 1) * step for size, step in zip(out.shape, out.stride(), strict=True))
        extent_bytes = (extent + 1) * out.element_size() if out.numel() else 0
        if storage._cdata in given or storage.nbytes() != extent_bytes or out.requires_grad:
            return OTHER
        given.add(storage._cdata)
        return Made(out.shape, out.stride(), out.dtype, out.fake_device)

    def _made(self, made: Made) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device=META)
        return self._faked(empty, made.device)

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a view made by the meta kernel, which is as fast as a cache."""
        source = args[0]
        if type(source) is not FakeTensor or not self._plain(source):
            return func(*args, **kwargs)
        with in_kernel_invocation_manager(self.fake):
            out = func(*args, **kwargs)
        if type(out) in (list, tuple):
            return type(out)(self._faked(each, source.fake_device) for each in out)
        return self._faked(out, source.fake_device)

    def _faked(self, elem: torch.Tensor, device: torch.device) -> FakeTensor:
        """Return ``FakeTensor(fake, elem, device)`` with the attributes of the first one."""
        known = self._attributes.get(device)
        if known is None:
            first = FakeTensor(self.fake, elem, device)
            self._attributes[device] = dict(vars(first))
            return first
        fake = torch.Tensor._make_subclass(
            FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device
        )
        vars(fake).update(known)
        return fake


@functools.cache
def makes_view(func: Any) -> bool:
    """Return True if ``func`` only makes views."""
    return _effect(func) == VIEWS and is_free(func)


@functools.cache
def _effect(func: Any) -> str:
    """Return the effect of an operation, by its schema."""
    if getattr(func, "namespace", "") == "c10d":
        return SENDS if func._opname in COLLECTIVES else OTHER
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    name = func.name() if isinstance(func, torch._ops.OpOverload) else ""
    if not name or not is_builtin(func) or UNTOLD.intersection(func.tags):
        return OTHER
    if func.namespace == "prim":
        return OTHER
    schema = func._schema
    if schema.name in LIFTED or torch._C._dispatch_has_kernel_for_dispatch_key(name, composite):
        return OTHER
    if func.is_view or schema.name == HIDDEN_VIEW:
        return VIEWS
    aliased = [a for a in (*schema.arguments, *schema.returns) if a.alias_info]
    if not aliased:
        return MAKES if schema.returns else OTHER
    first, last = schema.arguments[0], schema.arguments[-1]
    if len(aliased) != 2 or len(schema.returns) != 1:
        return OTHER
    if first.alias_info and first.alias_info.is_write and str(first.type) == "Tensor":
        return WRITES
    return FILLS if last.is_out and last.name == "out" and str(last.type) == "Tensor" else OTHER
