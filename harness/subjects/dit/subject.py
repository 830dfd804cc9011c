"""The DiT of Peebles and Xie 2022 as a subject: its names, sizes and parts. No torch above."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from harness.subjects.dit import presets
from strategies.base import BadInput
from strategies.sizes import Sizes
from strategies.subject import DataFacts, Dimensions, Shaping, Subject

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from strategies.initial import Draw

__all__ = ["Dit"]

TARGETS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
"""The linear layers of a block that work on tokens; adaLN's work on one vector a sample."""

LARGEST_SIDE = 1024
"""Elements of a latent's side beyond which no search goes: 8192 pixels."""


RELATIVES: list[tuple[str, int, dict[str, int]]] = [
    *(("batch", batch, {}) for batch in (1, 2, 4, 8)),
    *(("depth", 2, {"depth": depth}) for depth in (1, 2, 4, 8)),
    *(("tokens", 2, {"grid": grid}) for grid in (4, 8, 12, 16)),
    *(("width", 2, {"width": width}) for width in (128, 256, 384, 512)),
]
"""Small DiTs for the laws of memory and FLOPs: what varies, batch size, sizes."""


def _relative(depth: int, grid: int, width: int) -> Dit:
    """A small DiT; heads have 64 units, as in the presets but XL."""
    model = f"DiT-S/2:depth={depth},width={width},heads={width // 64}"
    data = DataFacts(size=1, channels=4, input_size=2 * grid, classes=10)
    return Dit(model=model, data=data, objective="epsilon", class_dropout=0.1)


@dataclass(frozen=True, kw_only=True)
class Dit(Subject):
    """A preset, or one with other sizes: ``DiT-S/4:depth=24``."""

    parts: ClassVar[frozenset[str]] = frozenset(
        (
            "attend",
            "chain",
            "halves",
            "head",
            "label_table",
            "sized",
            "ends",
            "stages",
            "stripes",
            "token_blocks",
        )
    )
    objectives: ClassVar[tuple[str, ...]] = ("epsilon", "flow")
    random_blocks: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return self.model

    @property
    def shape(self) -> presets.Shape:
        """The five numbers that fix it."""
        return presets.shape_of(self.model)

    @property
    def learn_sigma(self) -> bool:
        """Whether the model predicts the variance too: the epsilon objective's second half."""
        return self.objective == "epsilon"

    @property
    def tile(self) -> int:
        return self.shape.patch_size

    def check(self) -> None:
        side = self.data.input_size
        if side % self.tile:
            raise BadInput(
                f"model {self.model} has patches of {self.tile}, which do not tile {side}x{side} "
                "latents; take another patch, or other --data"
            )

    # ---- what it is ----

    @classmethod
    def of(cls, shaping: Shaping, **fields: Any) -> Subject:
        """One frame is an image."""
        image = dataclasses.replace(shaping, frames=0) if shaping.frames == 1 else shaping
        return super().of(image, **fields)

    def make(self) -> nn.Module:
        from harness.subjects.dit import model

        return model.make(self.model, **self._options())

    def draws(self, seed: int, init: str) -> Draw:
        from harness.subjects.dit import start

        return start.draws(seed, init)

    def _options(self) -> dict[str, Any]:
        return {
            "input_size": self.data.input_size,
            "channels": self.data.channels,
            "classes": self.data.classes,
            "learn_sigma": self.learn_sigma,
            "class_dropout": self.class_dropout,
        }

    def small(self) -> Dit:
        data = dataclasses.replace(self.data, input_size=32)
        return dataclasses.replace(self, model="DiT-T/8", data=data)

    def sized(self, depth: int, width: int, heads: int) -> Dit:
        own = self.shape
        width, depth = width or own.hidden_size, depth or own.depth
        heads = heads or width * own.num_heads // own.hidden_size
        given = {"depth": depth, "width": width, "heads": heads, "patch": own.patch_size}
        preset, told = self.model.partition(":")[0], ",".join(f"{k}={v}" for k, v in given.items())
        found = dataclasses.replace(self, model=f"{preset}:{told}")
        found.check()
        return found

    def sizes_in(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        numbers = [int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")]
        last = shapes.get("final_layer.linear.weight", (0, 0))
        return 1 + max(numbers, default=-1), last[-1]

    def relatives(self) -> list[tuple[str, Dit, int]]:
        usual = {"depth": 4, "grid": 8, "width": 256}
        return [(varies, _relative(**usual | sizes), batch) for varies, batch, sizes in RELATIVES]

    def sizes_up(self) -> list[tuple[str, int]]:
        return presets.ladder(self.shape.patch_size)

    def samples_up(self, axis: str) -> list[tuple[Mapping[str, Any], float]]:
        """Square latents that patches tile, of synthetic data: what a plan is of."""
        tiles = range(self.tile, LARGEST_SIDE + 1, self.tile) if axis == "resolution" else ()
        own = self.data.input_size
        return [({"data": f"synthetic:{side}"}, (side / own) ** 2) for side in tiles]

    # ---- facts, from the sizes alone ----

    @property
    def parameters(self) -> int:
        return presets.parameter_count(self.shape, *self._data())

    @property
    def sizes(self) -> Sizes:
        return presets.sizes(self.shape, *self._data())

    @property
    def dimensions(self) -> Dimensions:
        shape = self.shape
        tokens = shape.tokens(self.data.input_size)
        return Dimensions(
            shape.depth, shape.hidden_size, shape.num_heads, tokens, inner=shape.mlp_size
        )

    @property
    def linears(self) -> tuple[str, ...]:
        return tuple(f"blocks.{i}.{name}" for i in range(self.shape.depth) for name in TARGETS)

    @property
    def attention_linears(self) -> tuple[str, ...]:
        return tuple(name for name in self.linears if ".attn." in name)

    @property
    def idle(self) -> tuple[str, ...]:
        return ()

    def _data(self) -> tuple[int, int, int, bool]:
        return (self.data.input_size, self.data.channels, self.data.classes, self.learn_sigma)

    # ---- its modules ----

    def groups(self, module: nn.Module) -> list[Sequence[nn.Module]]:
        return [module.blocks]

    def dtype(self, module: nn.Module) -> torch.dtype:
        return module.pos_embed.dtype  # it alone is never quantised or adapted

    def head(self, module: nn.Module) -> nn.Module:
        return module.final_layer

    def label_table(self, module: nn.Module) -> nn.Embedding:
        return module.y_embedder.embedding_table

    # ---- one prediction ----

    @property
    def rows(self) -> int:
        return self.data.input_size // self.shape.patch_size

    def cut(self, samples: Tensor, part: int, parts: int) -> Tensor:
        return samples.chunk(parts, dim=2)[part]  # stripes of rows: tokens are counted by rows

    def take_part(self, module: nn.Module, part: int, parts: int) -> None:
        module.part = (part, parts)

    def predict(self, model: Any, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]) -> Any:
        return model(x, t_B, conditions["y"], conditions.get("drop"))
