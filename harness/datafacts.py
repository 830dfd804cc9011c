"""What a model must know of its data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DataFacts"]


@dataclass(frozen=True)
class DataFacts:
    """What a model must know of its data: samples are [channels, input_size, input_size]."""

    size: int
    channels: int
    input_size: int
    classes: int

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one sample."""
        return (self.channels, self.input_size, self.input_size)
