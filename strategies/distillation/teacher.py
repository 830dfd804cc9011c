"""A frozen model beside the trained one: how it is made, stored and asked.

Imports torch: import it where torch is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strategies import initial
from strategies.base import BadInput, Watcher, demand
from strategies.distillation import storing
from strategies.distillation.files import weights
from strategies.distillation.hidden import Hidden, hear
from strategies.evidence.frozen import checksum
from strategies.evidence.stored import scales, stored
from strategies.evidence.watching import beside
from strategies.subject import Subject

__all__ = ["Teacher"]


class Teacher(Watcher):
    """The frozen model of ``subject`` with the weights of ``file`` (without one, drawn), stored as
    ``store`` says. It computes in the type of what it does not pack, outside of any autocast.

    ``calls`` counts its forward passes; ``pairs`` are its blocks whose hidden states are kept;
    ``began`` is how far the student's first weights were from its own, where they were to be those.
    Every rank has all of it: an engine that shards the student's weights does not know of it.
    """

    def __init__(
        self, subject: Subject, file: str, store: str, device: Any, pairs: Sequence[int]
    ) -> None:
        self.subject, self.calls = subject, 0
        self.began: float | None = None
        draw = weights(subject, file)
        self.module = initial.skeleton(subject.shell, draw)
        storing.pack(self.module, subject, store)
        initial.fill(self.module, draw, device)
        self.module.to(device).requires_grad_(False).eval()
        self.heard = Hidden.deaf()
        blocks = subject.blocks(self.module)
        hear(self.module, [blocks[place] for place in pairs], self.heard)
        self.module.register_forward_hook(self._count)
        self.sums = self._sums()

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def ask(
        self, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Its prediction for noisy samples, and the hidden states of its ``pairs``: no graph is
        kept of either."""
        off = torch.autocast(x.device.type, enabled=False)
        with torch.no_grad(), off, beside("teacher"), self.heard.heard() as states:
            return self.subject.predict(self.module, x, t_B, conditions), states

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Forward passes that are nobody's: of evidence."""
        kept = self.calls
        try:
            yield
        finally:
            self.calls = kept

    def weights(self) -> list[Tensor]:
        """Every tensor that holds its weights, scales of packed ones included."""
        own = [*self.module.parameters(), *self.module.buffers()]
        return [plain for tensor in own for plain in (*stored(tensor.data), *scales(tensor))]

    def tensors(self) -> Iterable[Tensor]:
        """Its weights."""
        return self.weights()

    def _sums(self) -> list[int]:
        # A sum of tensors without storage (a prediction's) is no number.
        plain = [t for t in self.weights() if type(t) in (Tensor, nn.Parameter)]
        return [checksum(tensor) for tensor in plain if tensor.device.type != "meta"]

    def state_dict(self) -> dict[str, Any]:
        """Checksums: its weights are in their own file."""
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse to go on with another teacher."""
        if state["sums"] != self.sums:
            raise BadInput("the teacher is not the one that this training began with; give its own")

    def recut(self, states: Sequence[dict[str, Any]], pieces: Sequence[Sequence[Any]]) -> None:
        """Every rank has all of it, however many there are."""
        self.load_state_dict(states[0])

    def facts(self, store: str) -> dict[str, Any]:
        """What it is by now: ``store``d in how many bytes, and that it did not move.

        Raises:
            NotInForce: it moved, takes gradients, or is stored in another way.
        """
        parameters = list(self.module.parameters())
        free = [p for p in parameters if p.requires_grad or p.grad is not None]
        demand(not free, f"{len(free)} of the teacher's weights take a gradient")
        demand(bool(self.sums) and self._sums() == self.sums, "the teacher's weights have moved")
        facts = storing.stored_facts(self.module, self.subject, store, self.weights())
        return {f"teacher_{name}": value for name, value in facts.items()}
