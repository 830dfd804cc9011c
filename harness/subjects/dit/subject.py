"""DiT subjects: image and token models with their names, sizes and parts. No torch at import."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from harness.subjects.dit import presets
from strategies.base import BadInput
from strategies.subject import Shaping, Stripes, Subject
from strategies.survey import Survey

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from strategies.initial import Draw


LARGEST_SIDE = 1024
"""Limit of a search: elements of a latent's side (8192 pixels)."""


@dataclass(frozen=True, kw_only=True)
class Dit(Subject):
    """A preset, or one with other sizes: ``DiT-S/4:depth=24``."""

    parts: ClassVar[Mapping[str, str]] = {
        "head": "final_layer",
        "label_table": "y_embedder.embedding_table",
        **dict.fromkeys(
            ("attend", "chain", "ends", "halves", "layers", "sized", "stripes", "token_blocks"), ""
        ),
    }
    objectives: ClassVar[tuple[str, ...]] = ("epsilon", "flow")
    random_blocks: ClassVar[bool] = False
    words: ClassVar[int] = 0
    """Size of the vocabulary, of a model of tokens."""

    @property
    def name(self) -> str:
        return self.model

    @property
    def shape(self) -> presets.Shape:
        """Return the numbers that define it."""
        return presets.shape_of(self.model)

    @property
    def tile(self) -> int:  # type: ignore[override]  # of each size
        return self.shape.patch_size

    def check(self) -> None:
        side = self.data.input_size
        if side % self.tile:
            raise BadInput(
                f"model {self.model} has patches of {self.tile}, which do not tile {side}x{side} "
                "latents; take another patch, or other --data"
            )

    @property
    def survey(self) -> Survey:
        sigma = self.objective == "epsilon"
        return presets.survey(self.shape, self.data, sigma, self.class_dropout, self.words)

    def make(self) -> nn.Module:
        from harness.subjects.dit.model import DiT

        # The epsilon objective needs a variance too.
        return DiT(**self._sizes(), learn_sigma=self.objective == "epsilon")

    def _sizes(self) -> dict[str, Any]:
        data = {"input_size": self.data.input_size, "num_classes": self.data.classes}
        data["in_channels"] = self.data.channels
        return {**vars(self.shape), **data, "class_dropout_prob": self.class_dropout}

    def draws(self, seed: int, init: str) -> Draw:
        from harness.subjects.dit import model

        return model.draws(seed, init)

    def small(self) -> Dit:
        data = dataclasses.replace(self.data, input_size=32)
        return dataclasses.replace(self, model="DiT-T/8", data=data)

    def sized(self, depth: int, width: int, heads: int) -> Dit:
        own = self.shape
        width, depth = width or own.hidden_size, depth or own.depth
        heads = heads or width * own.num_heads // own.hidden_size
        given = {"depth": depth, "width": width, "heads": heads, "patch": own.patch_size}
        preset, text = self.model.partition(":")[0], ",".join(f"{k}={v}" for k, v in given.items())
        found = dataclasses.replace(self, model=f"{preset}:{text}")
        found.check()
        return found

    def sizes_in(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        numbers = [int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")]
        last = shapes.get("final_layer.linear.weight", (0, 0))
        return 1 + max(numbers, default=-1), last[-1]

    def samples_up(self, axis: str) -> list[tuple[Mapping[str, Any], float]]:
        """Return square latents that patches tile, of synthetic data, as a plan uses."""
        tiles = range(self.tile, LARGEST_SIDE + 1, self.tile) if axis == "resolution" else ()
        own = self.data.input_size
        return [({"data": f"synthetic:{side}"}, (side / own) ** 2) for side in tiles]

    def groups(self, module: nn.Module) -> list[Sequence[nn.Module]]:
        return [module.blocks]

    @property
    def stripes(self) -> Stripes:
        return Stripes(2, self.data.input_size // self.tile)  # of rows: tokens are in their order

    def take_part(self, module: nn.Module, part: int, parts: int) -> None:
        module.part = (part, parts)

    def predict(self, model: Any, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]) -> Any:
        return model(x, t_B, conditions["y"], conditions.get("drop"))


# ---- tokens ----
# A DiT over tokens of a vocabulary, such as an image tokenizer's codes: ``DiT-S/4:tokens=8192``.
# Blocks, positions, times and labels are the DiT's. A table embeds the tokens. The final layer
# computes logits over the vocabulary and their loss, so that no engine has to pass its weight
# elsewhere.


KEY = "tokens="
TOKENS_POOL = 256
"""Number of its synthetic samples: two MiB at 1024 tokens."""


def is_named(model: str) -> bool:
    """Return whether ``model`` is a DiT over tokens."""
    return model.startswith("DiT") and any(
        word.startswith(KEY) for word in model.partition(":")[2].split(",")
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenDit(Dit):
    """A DiT that predicts hidden tokens; its name has the size of the vocabulary."""

    parts: ClassVar[Mapping[str, str]] = {
        **{part: path for part, path in Dit.parts.items() if part != "sized"},
        "vocabulary": "final_layer.linear",
    }
    objectives: ClassVar[tuple[str, ...]] = ("masked",)
    brings_samples: ClassVar[bool] = True

    @classmethod
    def of(cls, shaping: Shaping, **fields: Any) -> Subject:
        found: Any = super().of(shaping, **fields)
        side = found.data.input_size // found.shape.patch_size
        data = dataclasses.replace(found.data, size=TOKENS_POOL, shape=(side * side,))
        return dataclasses.replace(found, data=data)

    def check(self) -> None:
        super().check()
        words = [word for word in self.model.partition(":")[2].split(",") if word.startswith(KEY)]
        value = words[0].removeprefix(KEY)
        if len(words) > 1 or not value.isdecimal() or int(value) < 2:
            raise BadInput(f"model {self.model}: tokens is {value!r}; once, a whole number from 2")

    @property
    def words(self) -> int:  # type: ignore[override]  # of each size
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

    def make(self) -> nn.Module:
        from harness.subjects.dit.token_model import TokenDiT

        return TokenDiT(self.words, **self._sizes() | {"in_channels": 1})

    def small(self) -> TokenDit:
        data = dataclasses.replace(self.data, input_size=32, shape=(16,))
        return dataclasses.replace(self, model="DiT-T/8:tokens=64", data=data)

    def samples(self) -> dict[str, Tensor]:
        import torch

        generator = torch.Generator().manual_seed(0)
        shape = (self.data.size, *self.data.sample_shape)
        x = torch.randint(0, self.words, shape, generator=generator)
        return {"x": x, "y": torch.randint(0, self.data.classes, shape[:1], generator=generator)}

    def example(self, device: torch.device | str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        import torch

        x, t_B, conditions = super().example(device)
        # All tokens differ: with equal tokens a test of attention would show nothing.
        tokens = torch.arange(x.shape[-1], device=device) % self.words
        return tokens.expand(1, 2, -1), t_B, conditions

    @property
    def stripes(self) -> Stripes:
        return super().stripes._replace(axis=-1)  # rows follow one another

    def predict(self, model: Any, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]) -> Any:
        """Return the loss of tokens and targets ``x`` [B, 2, T], or the logits [B, V, T] of tokens
        [B, T]."""
        if x.ndim == 2:
            return model(x, t_B, conditions["y"], conditions.get("drop")).transpose(1, 2)
        seen, wanted = x.unbind(1)
        return model(seen, t_B, conditions["y"], conditions.get("drop"), wanted)
