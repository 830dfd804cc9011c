"""Frozen teacher of a distillation run: storage, forward pass, hidden states and the student's
loss.

Imports torch. Shape suffixes: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strategies import initial
from strategies.base import Attachment, BadInput, demand
from strategies.distillation.files import weights
from strategies.evidence.states import checksum
from strategies.evidence.watching import in_phase
from strategies.subject import Subject

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""``store`` -> the type of the teacher's weights."""
NAME = "hidden_states"
"""Attribute of a student that has its ``Hidden``."""


class Hidden:
    """Recorder of the outputs of ``blocks``; it records nothing while blocks are recomputed."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.states: list[Tensor] = []
        self.listening = False
        for block in blocks:
            block.register_forward_hook(self._note)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Yield the list of states [B, T, D] of one forward pass, complete after it."""
        self.states, self.listening = [], True
        try:
            yield self.states
        finally:
            self.states, self.listening = [], False

    def _note(self, block: nn.Module, given: Any, out: Any) -> None:
        if self.listening:
            self.states.append(out)


class Teacher(Attachment):
    """Frozen model of ``subject`` with the weights of ``file``, in the type ``store``.

    Without a file the weights are drawn. It computes in that type, outside any autocast. Every rank
    holds the whole teacher: an engine that shards the student's weights does not shard it.

    ``calls``: number of its forward passes. ``pairs``: indices of its blocks whose hidden states
    are recorded.
    """

    def __init__(
        self, subject: Subject, file: str, store: str, device: Any, pairs: Sequence[int]
    ) -> None:
        self.subject, self.calls = subject, 0
        draw = weights(subject, file)
        self.module = initial.skeleton(subject, draw)
        initial.cast(self.module, FLOATS[store])
        initial.fill(self.module, draw, device)
        self.module.to(device).requires_grad_(False).eval()
        blocks = subject.blocks(self.module)
        self.captured = Hidden([blocks[place] for place in pairs])
        self.sums = self._sums()

    def ask(
        self, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return its output for noisy samples, and the hidden states of its ``pairs``, without a
        graph."""
        self.calls += 1
        off = torch.autocast(x.device.type, enabled=False)
        with torch.no_grad(), off, in_phase("teacher"), self.captured.recording() as states:
            return self.subject.predict(self.module, x, t_B, conditions), states

    def weights(self) -> list[Tensor]:
        return [tensor.data for tensor in (*self.module.parameters(), *self.module.buffers())]

    tensors = weights

    def _sums(self) -> list[int]:
        # Tensors without storage (in a prediction) have no sum.
        return [checksum(tensor) for tensor in self.weights() if tensor.device.type != "meta"]

    def state_dict(self) -> dict[str, Any]:
        """Return checksums: its weights are in their own file."""
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse to resume with another teacher."""
        if state["sums"] != self.sums:
            raise BadInput("the teacher is not the one that this training began with; give its own")

    def check(self, store: str) -> None:
        """Demand that it is stored as ``store``, takes no gradients, and did not change."""
        parameters = list(self.module.parameters())
        free = sum(p.requires_grad or p.grad is not None for p in parameters)
        demand(not free, f"{free} of the teacher's weights take a gradient")
        demand(bool(self.sums) and self._sums() == self.sums, "the teacher's weights have changed")
        kinds = {p.dtype for p in parameters}
        demand(kinds == {FLOATS[store]}, f"the teacher is stored in {kinds}, expected {store}")


# ---- distillation loss ----


Predict = Callable[[Tensor, Tensor], Tensor]
"""(noisy samples, timesteps [B]) -> the model's output."""


def squared(out: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error, a float32 scalar."""
    return (out.float() - target.float()).square().mean()


def relative(state_B: Tensor, target_B: Tensor) -> Tensor:
    """Return the squared error of hidden states relative to the target's square, per sample.

    A batch cut into micro-batches thus has the same loss. A float32 scalar.
    """
    gap_B = (state_B.float() - target_B.float()).square().flatten(1).mean(1)
    return (gap_B / target_B.float().square().flatten(1).mean(1)).mean()


@dataclass
class Lesson:
    """Distillation loss, which replaces the true loss: the sum of its terms by their ``weights``.

    The terms are "true", "output" and "feature"; one of weight 0 is not computed. The teacher runs
    before the student, so that its memory is freed before activations are kept for backward.
    """

    teacher: Teacher
    captured: Hidden
    weights: Mapping[str, float]

    def __call__(
        self,
        true_loss: Callable[[Predict], Tensor],
        predict: Predict,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """Return the loss of one micro-batch, a scalar
        (``strategies.engine.TrainingRun.supervise``)."""
        said: list[Any] = []

        def ask(x: Tensor, t_B: Tensor) -> Tensor:
            target, wanted = self.teacher.ask(x, t_B, conditions)
            with self.captured.recording() as states:
                out = predict(x, t_B)
            said.append((out, target, states, wanted))
            return out

        terms = {"true": true_loss(ask).mean()}
        out, target, states, wanted = said.pop()
        if self.weights["output"]:
            terms["output"] = squared(out, target)
        if self.weights["feature"]:
            pairs = zip(states, wanted, strict=True)
            terms["feature"] = torch.stack([relative(*pair) for pair in pairs]).mean()
        return sum(self.weights[name] * term for name, term in terms.items() if self.weights[name])


def ends(depth: int, of: int) -> list[int]:
    """Return, for each of ``depth`` blocks, the index of the block at the same relative depth of
    ``of``.

    The last matches the last.
    """
    return [max(0, round((i + 1) * of / depth) - 1) for i in range(depth)]
