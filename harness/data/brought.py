"""Dataset of a model that brings its own samples, in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from harness.data.feed import Ready
from harness.data.latents import on_device
from strategies.subject import DataFacts

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Brought(Ready):
    """Dataset in host memory.

    ``held`` has "x" and its conditions, as rows of samples. The samples of a step are copied to
    ``device``. They stay in host memory because the text of some models takes megabytes per sample,
    and trainers do not keep their data on the GPU.
    """

    def __init__(
        self, facts: DataFacts, held: Mapping[str, Tensor], device: torch.device | str
    ) -> None:
        import torch

        self.facts, self.device = facts, torch.device(device)
        self.names = tuple(held)
        # Attributes, because a CPU's meter excludes a dataset's attributes.
        vars(self).update({f"held_{name}": tensor for name, tensor in held.items()})

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        """See ``Dataset.fetch``."""
        import torch

        chosen = torch.from_numpy(np.array(indices))
        held = {name: getattr(self, f"held_{name}")[chosen] for name in self.names}
        rows = {name: on_device(tensor, self.device) for name, tensor in held.items()}
        return rows.pop("x"), rows
