"""How a prediction stands in for an engine's launch, and the books that it writes in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from strategies.engine import Launch, Trained

__all__ = ["Books", "Imitation"]


class Books(Protocol):
    """Where an imitation records what no op of a traced training shows; the tracer of a prediction
    is one (``harness.predict.tracing.trace``)."""

    def hold(self, pool: str, size: int, op: str, category: str) -> Callable[[], None]:
        """Record ``size`` bytes of pool "device", "host" or "nvme" as held from now on, made by
        ``op`` (a name for the reader). Call the result to record that they are freed."""

    def pin(self, tensor: Any, pinned: bool = True) -> None:
        """Count a tensor in host memory as what it takes where it is ``pinned``
        (``strategies.sizes.pinned_block``), or, False, as its bytes after all."""

    def tag(self, category: str, tensors: Iterable[Any]) -> None:
        """Give tensors that live now their category, where they have none."""

    def move(self, category: str, source: str, target: str) -> int:
        """Count all of ``category`` that the trace has in pool ``source`` in pool ``target``
        instead, from the start of the trace on. Returns the bytes of it that are held now."""

    def work(self, phase: str, kind: str, size: int) -> None:
        """Record ``size`` bytes moved in a phase of the step; kind is overlapped, host or nvme
        (``harness.predict.speed.roofline.Work``)."""


class Imitation:
    """How a prediction stands in for an engine's launch, on tensors without storage.

    Its methods are called in the order in which they stand here (``harness.predict.tracing``); the
    defaults do nothing, which is right for an engine that runs without storage as it is.
    ``ranks``: whether the engine wants a process group (a fake one is made).
    """

    ranks: ClassVar[bool] = True
    shapes_in: ClassVar[tuple[str, ...]] = ()
    """Endings of the library's files that remember shapes as tensors on ``meta``; these are not
    counted as the GPU's, whose tensors are on ``meta`` here as well."""

    def beside(self, launch: Launch) -> frozenset[str]:
        """The phases of a step in which collectives run beside the computation; those that the
        imitation itself records (``Books.work``) are not meant."""
        return frozenset()

    def environment(self, launch: Launch) -> dict[str, str]:
        """Variables that accelerate's launcher would add to a rank's environment for this engine;
        set as long as the prediction lasts."""
        return {}

    def begin(self, launch: Launch, device: str) -> None:
        """Called once the process group is there and before ``Accelerator`` is made: give the
        library its view of the device. ``device`` is the device type whose tensors stand for the
        GPU's ("meta")."""

    def made(self, accelerator: Any, launch: Launch) -> None:
        """Called with the new ``Accelerator``: set its state to what it would be on GPUs."""

    def stand_ins(self, books: Books) -> list[contextlib.AbstractContextManager[Any]]:
        """Contexts, entered before the set-up and left after the last step, that replace what needs
        real bytes; each says why."""
        return []

    def prepared(self, trained: Trained, books: Books) -> Callable[[], None]:
        """Called between ``Engine.ready`` and the first step: record in ``books`` what lives beside
        the prepared objects. The result is called after the last step."""
        return lambda: None
