"""The model of one rank, from nothing to its first weights: made without values where its subject
can draw each weight by its name, else built whole; then edited, filled, and told by a hash."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.data.caches.named import is_cache
from harness.resolve import Resolved
from harness.worker import weights
from strategies import initial
from strategies.initial import Draw

__all__ = ["Building", "combined", "tensor_digest"]


def tensor_digest(tensor: Tensor) -> str:
    """A hash of a tensor's bytes."""
    plain = tensor.detach().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(plain.numpy()).hexdigest()


def combined(digests: Mapping[str, str]) -> str:
    """A short hash of all parameters' hashes by name, whatever their order."""
    text = "".join(f"{name}:{digest};" for name, digest in sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Hashed:
    """A subject's draws, and the hash of each that was made: of the float32 values, before they are
    cast, packed or split, so that it is one for all rows of a suite."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.digests: dict[str, str] = {}

    def __call__(self, name: str, like: Tensor) -> Tensor:
        values = self.draw(name, like)
        self.digests[name] = tensor_digest(values)
        return values


class Building:
    """One rank's bare model while it comes into being; ``module`` throughout.

    In order: ``edit``, then ``finish`` once the engine is configured.
    """

    def __init__(self, resolved: Resolved) -> None:
        subject = resolved.subject
        # What a part of the recipe puts in the place of the named model has weights of its own.
        named = {"model": subject.model, "weights": resolved.weights}
        spec = dataclasses.replace(resolved.spec, **named)
        self.resolved, self.notes = resolved, list[str]()
        draw = weights.first_values(spec, subject)
        if draw is None:
            self.module = subject.build(spec.seed, spec.init)
            weights.put(spec, subject, self.module)
            named = self.module.named_parameters()
            self.drawn, self.whole = None, {name: tensor_digest(p) for name, p in named}
            self.notes.append(
                f"load: {subject.name} is built whole in float32 in host memory by every rank, for "
                "it does not say how each weight is drawn (Subject.draws)"
            )
        else:
            self.drawn, self.whole = Hashed(draw), {}
            self.module = initial.skeleton(subject.shell, self.drawn)
            weights.check(spec, draw, self.module)
        if is_cache(spec.data):
            size, count = subject.size_in_words, subject.data.size
            self.notes.append(f"samples: {count} of the cache, those of {size}")
        self._freeze_idle(subject.idle)

    def _freeze_idle(self, names: Sequence[str]) -> None:
        """What gets no gradient is frozen, before anything counts what is trained."""
        for name in names:
            self.module.get_parameter(name).requires_grad_(False)
        if names:
            count = sum(self.module.get_parameter(name).numel() for name in names)
            self.notes.append(
                f"frozen: {len(names)} parameters ({count:,} elements) get no gradient, of which "
                f"the first is {names[0]}"
            )

    @property
    def digest(self) -> str:
        """A short hash of the first weights, as every row of a suite draws them."""
        return combined(self.drawn.digests if self.drawn else self.whole)

    def edit(self) -> None:
        """Let every strategy edit the model, in slot order; before the first one that must see
        weights they are drawn, in host memory."""
        for part in self.resolved.recipe.strategies:
            if part.reads_weights and self.drawn:
                initial.fill(self.module, self.drawn, "cpu")
            part.edit_model(self.module, self.resolved.subject)

    def finish(self, accelerator: Any) -> nn.Module:
        """The model with its weights, where the engine wants them.

        Raises:
            ValueError: a parameter is left without a value.
        """
        if self.drawn:
            blocks = self.resolved.subject.blocks(self.module)
            self.resolved.launch.engine.fill(accelerator, self.module, self.drawn, blocks)
        if accelerator.device.type != "meta":  # as a prediction's GPU is
            self._see_that_all_have_values()
        return self.module

    def _see_that_all_have_values(self) -> None:
        for name, p in self.module.named_parameters():
            if p.device.type == "meta":
                raise ValueError(
                    f"{name} has no value: the strategy whose edit_model copied or made it must "
                    "say reads_weights = True"
                )
