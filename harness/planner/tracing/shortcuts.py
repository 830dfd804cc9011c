"""Patches for traces on tensors without storage, and shortcuts for large worlds."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from strategies.evidence import states

MANY = 8


class Shortcuts(TorchFunctionMode):
    """Function mode that reuses pieces of the same flat tensor, and joins many flat pieces as one.
    ZeRO-3 splits each gathered buffer and each gradient into one piece per rank and joins the
    pieces. At 1024 ranks this takes nine tenths of a prediction's time. Without storage, pieces of
    one length are alike and share the buffer's memory. One piece therefore replaces all, with the
    same memory and work."""

    def __init__(self) -> None:
        super().__init__()
        self._whole: Callable[[], Any] = lambda: None
        self._piece = self._whole  # weak references, here to nothing
        self._size, self._length = 0, -1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs:
            if func is torch.Tensor.narrow and len(args) == 4:
                return self._piece_of(func, args, args[3])
            if func is torch.Tensor.__getitem__ and type(args[1]) is slice:
                known = args[0] is self._whole() and args[1].step is None
                start, stop, _ = args[1].indices(self._size) if known else (0, 0, 1)
                return self._piece_of(func, args, max(0, stop - start) if known else None)
            if func is torch.chunk and len(args) == 2:
                return _chunk(*args)
            if func is torch.cat and len(args) == 1 and len(args[0]) > MANY:
                return _join(args[0])
        return func(*args, **(kwargs or {}))

    def _piece_of(self, func: Any, args: Any, length: Any) -> Any:
        """Return a piece of a flat tensor; the next one of the same length is the same object.
        Both are kept as weak references, because the cache must not extend their lifetime."""
        source = args[0]
        piece = self._piece() if source is self._whole() and length == self._length else None
        if piece is not None:
            return piece
        piece = func(*args)
        if source.ndim == 1 and not source.requires_grad:
            self._whole, self._piece = weakref.ref(source), weakref.ref(piece)
            self._size, self._length = len(source), len(piece)
        return piece


def _chunk(source: Any, count: int) -> tuple[Any, ...]:
    """Return ``count`` times the same piece, for a flat tensor that divides equally."""
    if source.ndim != 1 or source.requires_grad or not len(source) or len(source) % count:
        return torch.chunk(source, count)
    return (source.narrow(0, 0, len(source) // count),) * count


def _join(pieces: Any) -> Any:
    """Return the ``cat`` of one operand that is as long as all pieces, with equal bytes read and
    written."""
    distinct = {id(p): p for p in pieces}
    alike = {(p.ndim, p.dtype, p.device, p.requires_grad) for p in distinct.values()}
    lengths = {key: p.numel() for key, p in distinct.items()}
    some = next((distinct[key] for key, length in lengths.items() if length), None)
    if some is None or len(alike) > 1 or some.ndim != 1 or some.requires_grad:
        return torch.cat(pieces)
    return torch.cat([some[:1].expand(sum(lengths[id(p)] for p in pieces))])


@contextlib.contextmanager
def first_pieces() -> Iterator[None]:
    """Checksum only the first piece of one frozen weight of each shape.
    A run sums all bytes piece by piece. The other pieces allocate the same memory one after the
    other, and for a large model they are most of a trace's operations."""
    summed, checksum = set(), states.checksum

    def first(flat: torch.Tensor) -> tuple[torch.Tensor]:
        return (flat[: states.PIECE],)

    def once(tensor: torch.Tensor) -> int:
        kind = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if kind in summed:
            return 0
        summed.add(kind)
        return checksum(tensor)

    with mock.patch.object(states, "pieces", first), mock.patch.object(states, "checksum", once):
        yield


@contextlib.contextmanager
def stays_in_backward(mode: TorchFunctionMode) -> Iterator[None]:
    """Keep ``mode`` active in backward too, for recomputed ops.
    Torch disables function modes while ``backward`` runs."""
    run: Callable[..., Any] = torch.autograd._engine_run_backward

    def run_backward(*given: Any, **more: Any) -> Any:
        with mode:
            return run(*given, **more)

    with mock.patch.object(torch.autograd, "_engine_run_backward", run_backward), mode:
        yield


@contextlib.contextmanager
def storageless() -> Iterator[None]:
    """Patch the set-up during a prediction, so that it runs without storage.
    No patch changes the device's allocations. Engines have their own (``TraceAdapter.patches``)."""
    from harness.worker import setup

    patches = [
        # Weights without storage have no bytes for a digest.
        (setup, "tensor_digest", lambda tensor: "not computed"),
        (torch.nn.Module, "_apply", apply_in_place),
        (torch, "Generator", HostGenerator),
        # It reads a tensor without values to find out if gradients overflowed.
        (torch.amp.GradScaler, "_maybe_opt_step", step_always),
        (torch.Tensor, "any", some_weight),
        (torch.Tensor, "__deepcopy__", copy_without_value),
    ]
    with contextlib.ExitStack() as stack:
        for target, name, patched in patches:
            stack.enter_context(mock.patch.object(target, name, patched))
        # copy.deepcopy of a fake tensor copies its mode too. Operations of another mode would
        # allocate new memory for each view of the copy.
        same = mock.patch.object(FakeTensorMode, "__deepcopy__", lambda mode, _: mode, create=True)
        stack.enter_context(same)
        yield


def apply_in_place(self: torch.nn.Module, fn: Callable, recurse: bool = True) -> torch.nn.Module:
    """Apply ``fn`` as ``Module._apply`` does, for fake tensors, which the original refuses to swap.
    As in the original, a parameter stays the same object, so that existing optimizers still refer
    to it."""
    if recurse:
        for child in self.children():
            child._apply(fn)
    for p in self._parameters.values():
        if p is None:
            continue
        with torch.no_grad():
            moved = fn(p)
            if moved is not p:
                _become(p, torch.nn.Parameter(moved, p.requires_grad))
            if getattr(p, "quant_state", None) is not None:
                p.quant_state.to(p.device)  # as bitsandbytes' own parameter moves its scales
    for name, b in self._buffers.items():
        if b is not None:
            self._buffers[name] = fn(b)
    return self


def _become(p: Any, other: Any) -> None:
    """Swap as ``torch.utils.swap_tensors`` does, without its check for weak references.
    Fake tensors always have some, and they stay valid because the Python object stays the same."""
    torch._C._swap_tensor_impl(p, other)
    p.fake_device, other.fake_device = other.fake_device, p.fake_device
    # Autograd's data is swapped too, with the hooks that run. The original sets ``data``, which
    # keeps them: torchao's offload registers its hooks before accelerate moves the adapters.
    if p.requires_grad:
        p._backward_hooks = p._backward_hooks
        p._post_accumulate_grad_hooks = p._post_accumulate_grad_hooks


class HostGenerator(torch.Generator):
    """Generator on the CPU for any device: meta has none, and needs no random numbers."""

    def __new__(cls, device: Any = "cpu") -> HostGenerator:
        return super().__new__(cls, "cpu")


ANY, COPY = torch.Tensor.any, torch.Tensor.__deepcopy__


def copy_without_value(self: Any, memo: Any) -> Any:
    """Return a deep copy. The value that a fake tensor of a number keeps is real memory, and a
    fake mode cannot copy it: torchao's learning rate is such a tensor."""
    if getattr(self, "constant", None) is not None:
        self.constant = None
    return COPY(self, memo)


def some_weight(self: Any, *given: Any, **more: Any) -> Any:
    """Return True for a parameter: prodigyopt copies first weights that are not all zero."""
    return True if isinstance(self, torch.nn.Parameter) else ANY(self, *given, **more)


def step_always(self: Any, optimizer: Any, optimizer_state: Any, *given: Any, **more: Any) -> Any:
    """Step as ``GradScaler._maybe_opt_step`` does when no gradient overflowed."""
    return optimizer.step(*given, **more)
