"""Hidden states of blocks, heard as a model runs, and projected where a teacher is wider.

Imports torch: import it where torch is there. Shape suffixes: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strategies.initial import keyed

__all__ = ["NAME", "Hidden", "hear"]

NAME = "hidden_states"
"""The name, in a student, of what hears it: its parameters are the training's, not the model's."""


class Hidden(nn.Module):
    """What the chosen blocks of a model return, while it is listened to; ``projections`` take each
    to the width of the teacher, where that is another.

    It is part of the model, so that an engine shards and steps the projections as all else, and
    that they run within its forward pass. It hears nothing while blocks are recomputed.
    """

    def __init__(self, count: int, width: int, wanted: int, dtype: torch.dtype) -> None:
        super().__init__()
        projected = count if width != wanted else 0
        self.projections = nn.ModuleList(
            nn.Linear(width, wanted, bias=False, dtype=dtype) for _ in range(projected)
        )
        for place, layer in enumerate(self.projections):
            chance = keyed(0, f"{NAME}.{place}")
            first = torch.randn(wanted, width, generator=chance, device="cpu") / width**0.5
            layer.weight = nn.Parameter(first.to(dtype))
        self.states: list[Tensor] = []
        self.listening = False

    @classmethod
    def deaf(cls) -> Hidden:
        """One that nothing is told to."""
        return cls(0, 1, 1, torch.float32)

    @contextlib.contextmanager
    def heard(self) -> Iterator[list[Tensor]]:
        """A list of the states [B, T, D] of one forward pass, complete behind it."""
        self.states, self.listening = [], True
        try:
            yield self.states
        finally:
            self.states, self.listening = [], False

    def note(self, state: Any) -> None:
        """What a block returned: a forward hook calls it."""
        if self.listening:
            self.states.append(state)

    def project(self) -> None:
        """At the end of the forward pass: in the place of states their projections."""
        if self.listening and len(self.projections):
            pairs = zip(self.projections, self.states, strict=True)
            self.states[:] = [layer(state.to(layer.weight.dtype)) for layer, state in pairs]


def hear(module: nn.Module, blocks: Sequence[nn.Module], heard: Hidden) -> None:
    """Have ``heard`` note what each of ``blocks`` returns when ``module`` runs. Called before the
    engine's hooks, so that these see what is projected as part of the forward pass."""
    for block in blocks:
        block.register_forward_hook(lambda part, given, out: heard.note(out))
    module.register_forward_hook(lambda part, given, out: heard.project())
