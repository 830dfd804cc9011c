"""Steps that are taken while backward runs, and how many bytes of gradients are alive meanwhile."""

from __future__ import annotations

import weakref
from typing import Any

from strategies.base import Watcher
from strategies.engine import Trained

__all__ = ["InBackward"]


class InBackward(Watcher):
    """Steps each parameter as its gradient arrives, and frees the gradient.

    One optimizer over one group narrowed to that parameter: state, settings and checkpoints stay
    those of the whole. ``most_bytes`` is the most that gradients' storages held at once, each
    counted until it is really freed: a reference that something else keeps would show. Where
    gradients of a block are parts of one tensor, it counts once.
    """

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.optimizer = trained.inner_optimizer
        self.live_bytes = self.most_bytes = 0
        self.norms: list[Any] = []
        self.watched: list[Any] = []
        self.updates = 0
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.register_post_accumulate_grad_hook(self._stepper(group))
        trained.gradient_norm = self.gradient_norm

    def _stepper(self, group: dict[str, Any]) -> Any:
        def step(p: Any) -> None:
            mine = self.trained.engine.part(p.grad)
            self._follow(mine.untyped_storage())
            self.norms.append(mine.norm())
            del mine
            whole = self.optimizer.param_groups
            self.optimizer.param_groups = [{**group, "params": [p]}]
            try:
                self.optimizer.step()
            finally:
                self.optimizer.param_groups = whole
            p.grad = None
            self.updates += 1

        return step

    def _follow(self, storage: Any) -> None:
        self.watched = [w for w in self.watched if w() is not None]
        if any(w() is storage for w in self.watched):
            return
        size = storage.nbytes()

        def freed(_: Any) -> None:
            self.live_bytes -= size

        self.live_bytes += size
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        self.watched.append(weakref.ref(storage, freed))

    def gradient_norm(self) -> Any:
        """Global norm of the gradients of the backward that just ended, from the norm of each,
        taken before it was freed."""
        return self.trained.engine.norm_of(self.trained, self.norms)

    def after_step(self) -> None:
        """The norms were of this step."""
        self.norms = []
