"""A DiT over tokens of a vocabulary, such as an image tokenizer's codes: ``DiT-S/4:tokens=8192``.

Blocks, positions, times and labels are the DiT's. A table makes vectors of tokens, and the final
layer gives logits over the vocabulary, of which it takes the loss itself: no engine then needs to
hand its weight to somebody else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from harness.subjects.dit import presets
from harness.subjects.dit.subject import Dit
from strategies.base import BadInput
from strategies.subject import Shaping, Subject

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["TokenDit", "is_named"]

KEY = "tokens="
POOL = 256
"""Samples that it brings: two MiB at 1024 tokens."""


def is_named(model: str) -> bool:
    """Whether ``model`` is a DiT over tokens."""
    return model.startswith("DiT") and any(
        word.startswith(KEY) for word in model.partition(":")[2].split(",")
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenDit(Dit):
    """A DiT that predicts hidden tokens, of a vocabulary as large as its name says."""

    parts: ClassVar[frozenset[str]] = Dit.parts - {"sized"} | {"vocabulary"}
    objectives: ClassVar[tuple[str, ...]] = ("masked",)
    brings_samples: ClassVar[bool] = True

    @classmethod
    def of(cls, shaping: Shaping, **fields: Any) -> Subject:
        found = super().of(shaping, **fields)
        side = found.data.input_size // found.shape.patch_size
        data = dataclasses.replace(found.data, size=POOL, shape=(side * side,))
        return dataclasses.replace(found, data=data)

    def check(self) -> None:
        super().check()
        words = [word for word in self.model.partition(":")[2].split(",") if word.startswith(KEY)]
        value = words[0].removeprefix(KEY)
        if len(words) > 1 or not value.isdecimal() or int(value) < 2:
            raise BadInput(f"model {self.model}: tokens is {value!r}; once, a whole number from 2")

    @property
    def words(self) -> int:
        """The size of the vocabulary."""
        named = self.model.partition(KEY)[2]
        return int(named.partition(",")[0])

    @property
    def shape(self) -> presets.Shape:
        preset, _, options = self.model.partition(":")
        rest = ",".join(word for word in options.split(",") if not word.startswith(KEY))
        return presets.shape_of(f"{preset}:{rest}" if rest else preset)

    @property
    def size_in_words(self) -> str:
        return f"{self.data.sample_shape[0]} tokens"

    # ---- what it is: all of it read off one forward pass ----

    parameters, sizes = Subject.parameters, Subject.sizes
    train_flops, relatives, sizes_up = Subject.train_flops, Subject.relatives, Subject.sizes_up

    def make(self) -> nn.Module:
        from harness.subjects.dit import token_model

        options = {**self._options(), "learn_sigma": False}
        return token_model.make(self.shape, self.words, **options)

    def small(self) -> TokenDit:
        data = dataclasses.replace(self.data, input_size=32, shape=(16,))
        return dataclasses.replace(self, model="DiT-T/8:tokens=64", data=data)

    def vocabulary(self, module: nn.Module) -> Any:
        return getattr(module.final_layer, "linear", None)

    # ---- samples, and one loss ----

    def samples(self) -> dict[str, Tensor]:
        import torch

        generator = torch.Generator().manual_seed(0)
        shape = (self.data.size, *self.data.sample_shape)
        x = torch.randint(0, self.words, shape, generator=generator)
        return {"x": x, "y": torch.randint(0, self.data.classes, shape[:1], generator=generator)}

    def example(self, device: torch.device | str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        import torch

        x, t_B, conditions = super().example(device)
        # All of them others: attention to tokens that are alike would tell nothing.
        tokens = torch.arange(x.shape[-1], device=device) % self.words
        return tokens.expand(1, 2, -1), t_B, conditions

    def cut(self, samples: Tensor, part: int, parts: int) -> Tensor:
        return samples.chunk(parts, dim=-1)[part]  # rows follow one another

    def without_targets(self, x: Tensor) -> Tensor:
        return x[:, 0]

    def predict(self, model: Any, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]) -> Any:
        """The loss (``harness.subjects.masked``) of ``x``, tokens and targets [B, 2, T]; of tokens
        alone [B, T] logits [B, V, T]."""
        if x.ndim == 2:
            return model(x, t_B, conditions["y"], conditions.get("drop")).transpose(1, 2)
        seen, wanted = x.unbind(1)
        return model(seen, t_B, conditions["y"], conditions.get("drop"), wanted)

    def groups(self, module: nn.Module) -> list[Sequence[nn.Module]]:
        return [module.blocks]
