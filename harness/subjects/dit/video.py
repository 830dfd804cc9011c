"""A DiT on video latents: ``--model DiT-S/4 --frames 9 --data synthetic:32``.

Each frame is a latent of its own, as of an image encoder that is given frame by frame (Latte,
arXiv:2401.03048), and is cut into patches as an image is; attention sees the tokens of all frames
at once, and positions tell frame, row and column, as in CogVideoX (arXiv:2408.06072). One frame
(``--frames 1``) is the image model itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from harness.subjects.dit import presets
from harness.subjects.dit.subject import Dit
from strategies.base import BadInput
from strategies.subject import Dimensions, Shaping, Subject

if TYPE_CHECKING:
    from torch import Tensor

    from strategies.initial import Draw

__all__ = ["VideoDit"]

POOL = 8
"""Videos that it brings: 1.1 MiB at 9 frames of 32 x 32."""
LONGEST = 1024
"""Frames beyond which no search goes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoDit(Dit):
    """A DiT whose samples are [C, frames, H, W]: made up, of the data's channels and sides."""

    brings_samples: ClassVar[bool] = True

    @classmethod
    def of(cls, shaping: Shaping, **fields: Any) -> Subject:
        if shaping.data != "synthetic":
            raise BadInput(
                f"data is {shaping.data}, which are images; with --frames {shaping.frames} give "
                "--data synthetic or synthetic:SIZE, or leave --frames out"
            )
        found = super().of(dataclasses.replace(shaping, frames=0), **fields)
        side = found.data.input_size
        shape = (found.data.channels, shaping.frames, side, side)
        data = dataclasses.replace(found.data, size=POOL, shape=shape)
        return dataclasses.replace(found, data=data)

    def check(self) -> None:
        super().check()
        if self.shape.hidden_size % 16:
            raise BadInput(
                f"model {self.model} is {self.shape.hidden_size} wide, which frames, rows and "
                "columns cannot share (a quarter, and two times three eighths, each of sines and "
                "cosines); take a width that divides by 16"
            )

    @property
    def frames(self) -> int:
        """Frames of a sample: its latent has as many."""
        return self.data.shape[1]

    @property
    def size_in_words(self) -> str:
        return f"{super().size_in_words} of {self.frames} frames"

    # ---- what it is ----

    relatives = Subject.relatives

    def draws(self, seed: int, init: str) -> Draw:
        from harness.subjects.dit import start

        return start.draws(seed, init, self.frames)

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "frames": self.frames}

    def small(self) -> VideoDit:
        shape = (self.data.channels, self.frames, 32, 32)
        data = dataclasses.replace(self.data, input_size=32, shape=shape)
        return dataclasses.replace(self, model="DiT-T/8", data=data)

    def samples_up(self, axis: str) -> list[tuple[Mapping[str, Any], float]]:
        if axis != "frames":
            return super().samples_up(axis)
        return [({"frames": count}, count / self.frames) for count in range(1, LONGEST + 1)]

    @property
    def parameters(self) -> int:
        frozen = self.dimensions.tokens * self.shape.hidden_size
        return presets.trainable_count(self.shape, *self._data()) + frozen

    @property
    def dimensions(self) -> Dimensions:
        of_frame = super().dimensions
        return of_frame._replace(tokens=self.frames * of_frame.tokens)

    # ---- samples, and one prediction ----

    @property
    def undrawn(self) -> str:
        return ""

    def samples(self) -> dict[str, Tensor]:
        import torch

        chance = torch.Generator().manual_seed(0)
        shape = (self.data.size, *self.data.sample_shape)
        x = torch.randn(shape, generator=chance)
        return {"x": x, "y": torch.randint(self.data.classes, shape[:1], generator=chance)}

    def cut(self, samples: Tensor, part: int, parts: int) -> Tensor:
        return samples.chunk(parts, dim=3)[part]  # a stripe of rows of each frame
